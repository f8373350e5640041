# SPDX-License-Identifier: Apache-2.0
"""`as_gpu_kernel`: kernels whose body emits MLIR.

Such a kernel is one whose body is a single operation, the code that its author emits.
So it is planned, compiled, called and exported as any other one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_gpu import errors, expect, types
from pallas_gpu.bridge.torch import TorchFunction, as_torch_kernel
from pallas_gpu.emitters.module import WARPGROUP_THREADS
from pallas_gpu.entry import kernel as entry
from pallas_gpu.entry import over_arrays
from pallas_gpu.entry.caching import repeated
from pallas_gpu.entry.scoped import scoped
from pallas_gpu.mosaic.launch_context import LaunchContext
from pallas_gpu.mosaic.scratch import (
    CtaBarrier,
    CtaBarrierRef,
    Scratch,
    named_barriers,
)
from pallas_gpu.primitives import inline
from pallas_gpu.types import LoweringSemantics, values
from pallas_gpu.types import ProfilerSpec as ProfilerSpec

_WHO = "as_gpu_kernel"


@expect.arguments(
    prof_spec=expect.optional(
        expect.instance(ProfilerSpec, written="mosaic.ProfilerSpec(...)")
    )
)
def as_gpu_kernel(
    body: Callable[..., None],
    grid: Sequence[int],
    block: Sequence[int],
    in_shape: Any,
    out_shape: Any,
    smem_scratch_shape: Any,
    prof_spec: ProfilerSpec | None = None,
    cluster: Sequence[int] = (1, 1, 1),
    module_name: str = "unknown",
    kernel_name: str | None = None,
    ir_version: int | None = None,
    thread_semantics: LoweringSemantics = LoweringSemantics.Lane,
    inout_shape: Any = (),
) -> Callable[..., Any]:
    """Returns a function of arrays that launches a body which emits MLIR.

    The body runs when the kernel is lowered. It is called with a `LaunchContext`, a
    memref in GMEM for each array (inputs, arrays that are updated in place, results)
    and the tree of its scratch, and emits its code by this package's functions and by
    MLIR's dialects. On a machine without a GPU the code runs in lockstep.

    Issued by: the host. It completes like any JAX operation.

    Args:
      body: `body(ctx, *refs, scratch) -> None`.
      grid: blocks along x, y and z.
      block: CUDA threads along x, y and z; together whole warpgroups.
      in_shape: types of the arguments: one, or a tuple or list of them.
      out_shape: type of the result, or a tuple or list of them.
      smem_scratch_shape: a pytree of scratch: `jax.ShapeDtypeStruct` is an array in
        SMEM, row-major and aligned to 1024 bytes; `Union`, `Barrier`, `TMABarrier`,
        `ClusterBarrier`, `CtaBarrier`, `TMEM`.
      prof_spec: a `ProfilerSpec`: each launch writes a file with the spans that
        `LaunchContext.named_region` names.
      cluster: blocks of a cluster along x, y and z; the grid is a multiple.
      module_name: name of the module, unless `kernel_name` is given.
      kernel_name: name of the kernel; default: that of the body.
      ir_version: see `CompilerParams`.
      thread_semantics: `LoweringSemantics.Lane`.
      inout_shape: types of arguments, behind those of `in_shape`, that the kernel
        updates: what they contain then is returned behind the results.

    Returns:
      A function of arrays, whose results are a list; a single one if `out_shape` is.

    Raises:
      ArgumentError, ArgumentTypeError: sizes or types that cannot be launched.
      UnsupportedError: Warpgroup semantics.
    """
    _refuse(thread_semantics)
    inputs, updated = _sequence(in_shape), _sequence(inout_shape)
    outputs = _sequence(out_shape)
    expect.takes(
        expect.function(body, f"{_WHO}: body"),
        f"{_WHO}: body",
        (None,) * (len(inputs) + len(updated) + len(outputs) + 2),
        "they are the context, a memref for each array, and the scratch: "
        "def body(ctx, x_ref, o_ref, scratch):",
    )
    single = not isinstance(out_shape, tuple | list) and not updated
    name = kernel_name or getattr(body, "__name__", "anonymous")
    launch = _Launch(
        body,
        _mesh(grid, cluster, block, str(name)),
        _types(inputs, "in_shape"),
        _types(updated, "inout_shape"),
        _types(outputs, "out_shape"),
        Scratch.of(smem_scratch_shape),
        _params(prof_spec, ir_version),
    )
    del module_name

    def call(*args: Any) -> Any:
        results = launch(args)
        return results[0] if single else results

    return over_arrays.OverArrays(call, body)


@expect.arguments(
    prof_spec=expect.refused(
        None, "profile the kernel with arrays: testing.profile(as_gpu_kernel(...))"
    )
)
def as_torch_gpu_kernel(
    body: Callable[..., None],
    grid: Sequence[int],
    block: Sequence[int],
    in_shape: Any,
    out_shape: Any,
    smem_scratch_shape: Any,
    prof_spec: ProfilerSpec | None = None,
    cluster: Sequence[int] = (1, 1, 1),
    module_name: str = "unknown",
    kernel_name: str | None = None,
    thread_semantics: LoweringSemantics = LoweringSemantics.Lane,
    inout_shape: Any = (),
) -> TorchFunction:
    """Returns a function of PyTorch tensors that launches a body which emits MLIR.

    It is `plgpu.as_torch_kernel` of what `as_gpu_kernel` returns. Tensors of
    `inout_shape` are updated in place, and returned behind the results.

    Issued by: the host. It completes in the order of torch's current stream.

    Args:
      body, grid, block, in_shape, out_shape, smem_scratch_shape, cluster, module_name,
        kernel_name, thread_semantics, inout_shape: as of `as_gpu_kernel`.
      prof_spec: None.

    Raises:
      UnsupportedError: torch is missing, Warpgroup semantics, or a profile.
      ArgumentError, ArgumentTypeError: as of `as_gpu_kernel`.
    """
    kernel = as_gpu_kernel(
        body,
        grid,
        block,
        in_shape,
        out_shape,
        smem_scratch_shape,
        prof_spec,
        cluster,
        module_name,
        kernel_name,
        thread_semantics=thread_semantics,
        inout_shape=inout_shape,
    )
    return as_torch_kernel(kernel)


def _params(
    prof_spec: ProfilerSpec | None, ir_version: int | None
) -> types.CompilerParams:
    params = types.CompilerParams(
        lowering_semantics=LoweringSemantics.Lane, ir_version=ir_version
    )
    if prof_spec is None:
        return params
    return params.replace(
        profile_space=prof_spec.recording.space,
        profile_dir=prof_spec.dump_path,
        profile_trace_scope=prof_spec.trace_scope,
        profile_bounds_check=prof_spec.bounds_check,
    )


def _refuse(thread_semantics: Any) -> None:
    expect.member(LoweringSemantics)(thread_semantics, f"{_WHO}: thread_semantics")
    if thread_semantics is LoweringSemantics.Warpgroup:
        raise errors.UnsupportedError(
            "as_gpu_kernel: a body of MLIR has no layouts that could be inferred",
            expected="thread_semantics=LoweringSemantics.Lane",
            got="LoweringSemantics.Warpgroup",
            hint="write the body over references: plgpu.kernel infers layouts under "
            "Warpgroup semantics, and plgpu.inline_mgpu has inline code there",
        )


def _sequence(shape: Any) -> tuple[Any, ...]:
    return tuple(shape) if isinstance(shape, tuple | list) else (shape,)


def _types(shapes: Sequence[Any], what: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    entry.check_types(tuple(shapes), f"{_WHO}: {what}")
    return tuple(jax.ShapeDtypeStruct(tuple(x.shape), x.dtype) for x in shapes)


def _mesh(grid: Any, cluster: Any, block: Any, name: str) -> types.CudaMesh:
    sizes = []
    for given, what in ((grid, "grid"), (cluster, "cluster"), (block, "block")):
        found = expect.integers(1)(given, f"{_WHO}: {what}")
        if len(found) != 3:
            raise errors.ArgumentError(
                f"as_gpu_kernel: {what} does not have three dimensions",
                expected="(x, y, z)",
                got=given,
                hint="the size of an axis that is not used is 1",
            )
        sizes.append(found)
    grid, cluster, block = sizes
    if any(n % c for n, c in zip(grid, cluster, strict=True)):
        raise errors.ArgumentError(
            "as_gpu_kernel: the grid does not consist of whole clusters",
            expected=f"multiples of {cluster}",
            got=grid,
        )
    if math.prod(block) % WARPGROUP_THREADS:
        raise errors.ArgumentError(
            "as_gpu_kernel: a block does not consist of whole warpgroups",
            expected=f"a multiple of {WARPGROUP_THREADS} threads",
            got=f"block={block}, {math.prod(block)} threads",
        )
    return types.CudaMesh.of(grid, cluster, block, name)


@dataclasses.dataclass(frozen=True, eq=False)
class _Launch:
    """A kernel with the types of its arrays, and a cache of its traces."""

    body: Callable[..., None]
    mesh: types.CudaMesh
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    updated: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    scratch: Scratch
    params: types.CompilerParams

    @functools.cached_property
    def kept(self) -> repeated.Kept:
        """What is kept of its calls."""
        return repeated.Kept((self.body,))

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Launches it; returns the results, then what was updated."""
        arrays = self._checked(args)
        first, results = len(self.inputs), len(self.outputs)

        @functools.wraps(self.body)
        def over_references(*refs: Any) -> None:
            self._over_references(refs)

        found = entry.launch_body(
            over_references,
            arrays,
            (*self.outputs, *self.updated),
            mesh=self.mesh,
            name=self.mesh.kernel_name or "",
            compiler_params=self.params,
            interpret=None,
            debug=False,
            kept=self.kept,
            aliases=[(first + i, results + i) for i in range(len(self.updated))],
        )
        return list(found)

    def _checked(self, args: Sequence[Any]) -> list[Any]:
        """Returns the arguments, if they are what the kernel is for."""
        expected = (*self.inputs, *self.updated)
        leaves, tree = jax.tree.flatten(tuple(args))
        wanted = jax.tree.structure(expected)
        if tree != wanted:
            raise errors.ArgumentError(
                f"kernel {self.mesh.kernel_name}: other arguments than in_shape has",
                expected=f"{len(expected)} arrays: {wanted}",
                got=f"{len(leaves)}: {tree}",
            )
        found = []
        for i, (x, type_) in enumerate(zip(leaves, expected, strict=True)):
            what = f"kernel {self.mesh.kernel_name}: argument {i}"
            x = values.array(x, what)
            if x.shape != type_.shape:
                raise errors.ShapeError(
                    f"{what} has another shape",
                    expected=type_.shape, got=x.shape, hint="as in_shape says",
                )  # fmt: skip
            if x.dtype != type_.dtype:
                scalar = f"cast the scalar: np.{np.dtype(type_.dtype).name}(x)"
                raise errors.DTypeError(
                    f"{what} has another dtype",
                    expected=type_.dtype,
                    got=x.dtype,
                    hint="convert it: x.astype(...)" if x.shape else scalar,
                )
            found.append(x)
        return found

    def _over_references(self, refs: Sequence[Any]) -> None:
        """The body over references: one operation, in the scope of its scratch."""
        # An array that is updated has one reference, that of the result.
        first = len(self.inputs)
        refs = (*refs[:first], *refs[first + len(self.updated) :])

        def in_scope(*scratch: Any) -> None:
            found = self.scratch.in_order(scratch)
            given = [x for x in found if x is not None]
            self._code(len(refs), len(given))([*refs, *given])

        scoped(in_scope, self.scratch.declared, axes=self.mesh.thread_name or ())

    def _code(self, arrays: int, given: int) -> inline.Code:
        """Returns the operation that emits the body."""
        types_ = (inline.RefType(),) * (arrays + given)
        tree, none = jax.tree.structure((0,) * len(types_)), jax.tree.structure(None)
        return inline.Code(self._emit, types_, tree, (), none, synchronized=False)

    def _emit(self, ctx: LaunchContext, *handles: Any) -> None:
        """Calls the body with memrefs and its scratch."""
        arrays = len(self.inputs) + len(self.updated) + len(self.outputs)
        refs, given = handles[:arrays], iter(handles[arrays:])
        first, second = len(self.inputs), len(self.inputs) + len(self.outputs)
        refs = (*refs[:first], *refs[second:], *refs[first:second])
        named = named_barriers(self.scratch.leaves, self.mesh.warpgroups)
        scratch = [
            CtaBarrierRef(number, leaf.arrival_count, leaf.num_barriers)
            if isinstance(leaf, CtaBarrier) and number is not None
            else next(given)
            for leaf, number in zip(self.scratch.leaves, named, strict=True)
        ]
        self.body(ctx, *refs, jax.tree.unflatten(self.scratch.tree, scratch))
