# SPDX-License-Identifier: Apache-2.0
"""The check pass over all operations of a kernel.

JAX checks neither bounds of references nor whether an operation exists on a GPU, and
abstract evaluation is memoised, so checks cannot be there. The pass runs once for a
traced body, before emulation and lowering alike: a kernel that the emulator accepts
also lowers.

The properties that `define` declares are checked here for all operations; a family
registers further checks with `registry.checks`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pallas_gpu import _jax, arch, errors, types
from pallas_gpu.checks import jax_operations, references, warp
from pallas_gpu.checks.index_arithmetic import check_indices
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import cluster, inline
from pallas_gpu.primitives.warp import warp_map_p
from pallas_gpu.program.nodes import Constant, Fault, Op
from pallas_gpu.program.passes.no_elements import without_elements
from pallas_gpu.program.walk import Site, walk


def check_jaxpr(jaxpr: _jax.Jaxpr, mesh: types.Mesh) -> None:
    """Checks every operation of a body, and raises what is wrong with the first."""
    known: set[Any] = set()
    for site in walk(jaxpr):
        with errors.at(site.line):
            _check(site, mesh, known)
    for check in registry.PROGRAM_CHECKS:
        check(walk(jaxpr))
    check_indices(jaxpr, mesh)


# A slice may extend past the end of the array: its last index has to fit, too. A block
# of SMEM has fewer elements than this margin.
_MAX_DIMENSION = 2**31 - 2**18


def require_element_types(avals: Iterable[Any]) -> None:
    """Raises DTypeError for an array whose element type kernels do not support."""
    for aval in avals:
        array = isinstance(aval, (_jax.ShapedArray, types.KernelRef, Constant))
        # Tensor memory is rejected as a whole, whatever its elements.
        if array and getattr(aval, "memory_space", None) is not types.TMEM:
            types.kind(aval.dtype)


def require_indexable(avals: Iterable[Any]) -> None:
    """Raises UnsupportedError for a dimension whose indices exceed 32 bits.

    PTX ISA, cp.async.bulk.tensor: coordinates are .s32; so are grid indices and what a
    kernel computes from them, which would wrap.
    """
    for aval in avals:
        for axis, size in enumerate(aval.shape):
            if size > _MAX_DIMENSION:
                raise errors.UnsupportedError(
                    "a dimension is too large for 32-bit indices",
                    expected=f"at most {_MAX_DIMENSION} elements in each dimension",
                    got=f"{size} in dimension {axis} of shape {tuple(aval.shape)}",
                    hint="reshape the array to more dimensions before the call: "
                    "x.reshape(-1, 1024)",
                )


def _check(site: Site, mesh: types.Mesh, known: set[Any]) -> None:
    """Checks one operation; `known` are the values whose types were checked."""
    op = site.op
    # Scratch arrays are inputs of a region.
    inner = (value for region in op.regions for value in region.inputs)
    new = {*op.inputs, *op.results, *inner} - known
    require_element_types(x if isinstance(x, Constant) else x.aval for x in new)
    known |= new
    if site.is_inside(warp_map_p):
        warp.check_operation(op)
        if warp.is_position(site):
            return
    if op.operation is None:
        jax_operations.refuse_collective(op, mesh)
        if not _has_rules(op.primitive):
            raise jax_operations.unsupported(op)
    _refuse_empty(op)
    if isinstance(op.operands, Fault):
        raise op.operands.error
    references.check_accesses(op)
    cluster.check_axes(op, mesh)
    if (check := registry.check_of(op.primitive)) is not None:
        check(op, mesh)


def _refuse_empty(op: Op) -> None:
    """Refuses arrays without elements: no register layout holds them."""
    for value in op.results:
        if 0 in value.shape and not isinstance(value.aval, _jax.AbstractRef):
            raise without_elements(op.primitive, tuple(value.shape))


def _has_rules(primitive: Any) -> bool:
    """True for operations of JAX on values that are lowered."""
    kinds = registry.RuleKind.EMIT, registry.RuleKind.COMPOSITE
    return primitive.name in jax_operations.LOWERED or any(
        registry.rule(primitive, kind) is not None for kind in kinds
    )


def require_features(jaxpr: _jax.Jaxpr, target: arch.Target) -> None:
    """Raises TargetError for an operation that the target does not support."""
    for site in walk(jaxpr):
        operation = site.op.operation
        for feature, who in () if operation is None else operation.features(site.op):
            with errors.at(site.line):
                target.require(feature, who)
        if site.op.primitive is inline.inline_ptx_p:
            _require_since(site, target)


def _require_since(site: Site, target: arch.Target) -> None:
    since = site.op.params["since"]
    if since is None:
        return
    first, own = arch.target(since), getattr(target, "compute_capability", (0, 0))
    if own < first.compute_capability:
        raise errors.TargetError(
            f"inline_ptx: {target.name} does not have the instruction",
            expected=f"{since} or later",
            got=target.name,
            hint="choose another target: CompilerParams(target=...)",
            where=site.where,
        )


def features(jaxpr: _jax.Jaxpr) -> frozenset[arch.Feature]:
    """Returns the features that the operations of a body need."""
    found = ((site.op.operation, site.op) for site in walk(jaxpr))
    return frozenset(
        feature for x, op in found if x is not None for feature, _ in x.features(op)
    )
