# SPDX-License-Identifier: Apache-2.0
"""References of a kernel: the parts that operations access, and which are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pallas_gpu import _jax, errors, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import inline
from pallas_gpu.primitives.tensor_cores import tmem, wgmma
from pallas_gpu.primitives.tensor_cores.tcgen05 import tcgen05_mma_p
from pallas_gpu.program.build import region_of, variables_of
from pallas_gpu.program.nodes import Access, Op
from pallas_gpu.program.walk import Site, walk


def check_accesses(op: Op) -> None:
    """Checks that the parts of references that an operation accesses exist."""
    for access in op.accesses:
        if access.name not in access.operation.clipped:
            _require_inside(access)
        _require_reachable(access)
        if isinstance(access.buffer.aval, types.AccumulatorRef):
            stored = op.primitive in (_jax.swap_p, _jax.addupdate_p)
            wgmma.check_part(access.window, stored=stored)
        if access.space is types.TMEM:
            tmem.check_part(access.buffer.aval, access.window)


def _require_inside(access: Access) -> None:
    """Raises OutOfBoundsError unless each step to a part is within its operand."""
    steps, name = access.transforms, registry.called(access.operation.primitive)
    if len(steps) < 2:
        ops.require_inside(access.window, name)
        return
    shape = access.buffer.shape
    for step in steps:
        window = types.resolve(shape, (step,))
        ops.require_inside(window, name)
        shape = window.shape


def _require_reachable(access: Access) -> None:
    """Raises UnsupportedError for other devices' memory, unless it can be accessed."""
    operation, owner, is_one = access.operation, access.owner, access.device is not None
    names = operation.remote if is_one else operation.multicast
    if owner is None or access.name in names:
        return
    raise errors.UnsupportedError(
        f"{registry.called(operation.primitive)}: an operand is in the memory of "
        f"{'another device' if is_one else 'all devices'}",
        expected="a reference to memory of this device",
        got=f"a result of {'remote_ref' if is_one else 'multicast_ref'}",
        hint="reads, writes, atomic operations, copies and semaphore_signal reach one "
        "other device"
        if is_one
        else "copy_smem_to_gmem, multimem_store, multimem_load_reduce and "
        "semaphore_signal_multicast reach all devices",
    )


def check_inputs(jaxpr: _jax.Jaxpr, inputs: int) -> None:
    """Raises KernelError for an access that writes one of the first references.

    They are inputs: JAX's arrays are immutable, and other operations may use them.
    """
    # Inline code may be given an input to read it.
    for i, called, array, where in written_inputs(jaxpr, inputs, certain=True):
        raise errors.KernelError(
            f"input {i} ({array}) is written, but it is an input",
            expected="stores to outputs of the kernel and to scratch memory",
            got=f"{called} of an input",
            hint="declare a result for it, and write that; or pass a "
            "jax.new_ref(array), which kernels update in place",
            where=where,
        )


def written_inputs(
    jaxpr: _jax.Jaxpr, inputs: int, *, certain: bool = False
) -> Iterator[tuple[int, str, str, str | None]]:
    """Yields inputs that are written: number, by what, their description, the line."""
    arrays = region_of(jaxpr).inputs[:inputs]
    for origin, (access, site) in writes(jaxpr, certain=certain).items():
        if origin in arrays:
            called = registry.called(site.op.primitive)
            yield origin.index, called, types.describe(access.buffer.aval), site.where


def written(jaxpr: _jax.Jaxpr) -> set[Any]:
    """Returns the references that a body writes, as variables of its jaxpr."""
    pairs = zip(variables_of(jaxpr), region_of(jaxpr).inputs, strict=True)
    found = writes(jaxpr)
    return {var for var, value in pairs if value in found}


def written_operands(
    jaxpr: _jax.Jaxpr, among: Callable[[_jax.JaxprEqn], bool]
) -> dict[int, list[bool]]:
    """Returns which operands of some equations a body writes somewhere.

    By the identity of the equation; a function that is called twice writes what either
    call writes.
    """
    found, result = writes(jaxpr), dict[int, list[bool]]()
    for site in walk(jaxpr):
        if among(site.eqn):
            own = [may_be_among(site.origin(x), found) for x in site.op.inputs]
            before = result.get(id(site.eqn), [False] * len(own))
            result[id(site.eqn)] = [a or b for a, b in zip(own, before, strict=True)]
    return result


def may_be_among(ref: Any, others: Iterable[Any]) -> bool:
    """Whether the memory of a reference may be that of one of others.

    Members of unions share memory. A `jax.Ref` that a body closes over may be an
    argument too, which is known only when the traced kernel is complete.
    """
    return any(x is ref or _may_share(x, ref) for x in others)


def _may_share(*refs: Any) -> bool:
    avals = [getattr(x, "aval", None) for x in refs]
    if not all(isinstance(aval, _jax.AbstractRef) for aval in avals):
        return False
    spaces = {getattr(aval, "memory_space", None) for aval in avals}
    if None in spaces:
        return spaces <= {None, types.GMEM}
    return all(isinstance(x, types.KernelRef) and x.storage.overlay for x in avals)


def writes(
    jaxpr: _jax.Jaxpr, *, certain: bool = False
) -> dict[Any, tuple[Access, Site]]:
    """Returns the first access that writes a reference, with its operation.

    Args:
      certain: leaves out those that only may write it.
    """
    found: dict[Any, tuple[Access, Site]] = {}
    for site in walk(jaxpr):
        for access in site.op.accesses:
            if access.writes and not (certain and access.operation.opaque):
                found.setdefault(site.origin(access.buffer), (access, site))
    return found


def require_transforms(jaxpr: _jax.Jaxpr) -> None:
    """Raises LayoutError for arrays in SMEM whose transforms an operation lacks.

    A product needs tiling and swizzle, inline code what it declares.
    """
    for site in walk(jaxpr):
        if site.op.primitive is inline.inline_mgpu_p:
            with errors.at(site.line):
                inline.require_stored(site.op)
        if site.op.primitive not in (wgmma.wgmma_p, tcgen05_mma_p):
            continue
        for access in site.op.accesses:
            aval = access.buffer.aval
            of_product = access.name in ("a", "b") and access.space is types.SMEM
            if of_product and not aval.transforms:
                error = wgmma.storage_error(aval, access.name, site.op.name)
                raise error.with_location(site.where)
