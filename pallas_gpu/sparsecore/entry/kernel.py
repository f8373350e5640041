# SPDX-License-Identifier: Apache-2.0
"""`kernel`: the entry point for kernels that run on SparseCores."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_gpu import errors, expect, types
from pallas_gpu.entry import over_arrays, scope
from pallas_gpu.entry.caching import repeated
from pallas_gpu.entry.kernel import (
    check_types,
    interpretation,
    launch_body,
    with_scratch,
)
from pallas_gpu.entry.scoped import is_declaration
from pallas_gpu.entry.trace import Arrays, Traced
from pallas_gpu.program.build import region_of
from pallas_gpu.program.facts import Starts
from pallas_gpu.sparsecore import check
from pallas_gpu.sparsecore.check.kernel import Kernel
from pallas_gpu.sparsecore.entry import kinds, trace
from pallas_gpu.sparsecore.primitives.scoped import require_declaration
from pallas_gpu.sparsecore.types import (
    CompilerParams,
    ScalarSubcoreMesh,
    VectorSubcoreMesh,
    chips,
)

_MISSING: Any = object()
_A_MESH = expect.instance(
    VectorSubcoreMesh, ScalarSubcoreMesh, written="plsc.VectorSubcoreMesh(...)"
)


def _mesh(value: Any, what: str) -> Any:
    if not expect.is_sequence(value):
        return _A_MESH(value, what)
    return tuple(_A_MESH(mesh, what) for mesh in value)


_PARAMS = expect.optional(
    expect.instance(CompilerParams, written="plsc.CompilerParams(...)")
)


@expect.arguments(
    body=expect.anything,
    mesh=_mesh,
    compiler_params=_PARAMS,
    scratch_types=expect.anything,
)
def kernel(
    body: Any = _MISSING,
    out_type: Any = (),
    *,
    mesh: Any,
    scratch_types: Any = (),
    compiler_params: CompilerParams | None = None,
    interpret: bool | types.InterpretParams | None = None,
    cost_estimate: Any = None,
    debug: bool = False,
    name: str | None = None,
    metadata: dict[str, str] | None = None,
) -> Callable[..., Any]:
    """Turns a function over references into a function over arrays.

    Each subcore of the mesh runs the body; `lax.axis_index(name)` returns its position.
    Arguments and results are references in HBM, followed by scratch references; an
    argument that `jax.new_ref` has made is updated in place.
    Composes with `jax.jit`, `jax.vmap` (a launch for each instance), `lax.scan` and
    `lax.cond`.

    Issued by: the host. It completes like any JAX operation.

    Args:
      body: `body(*input_refs, *output_refs, *scratch_refs) -> None`. If omitted,
        `kernel` returns a decorator. A list of two: a body for each of two meshes,
        which run at the same time, with the same references.
      out_type: pytree of `jax.ShapeDtypeStruct` for the results. In the emulator,
        elements that the kernel does not store are an error.
      mesh: `VectorSubcoreMesh` or `ScalarSubcoreMesh`, or a list of one of each, of
        the same cores.
      scratch_types: sequence of declarations for positional scratch references, or a
        dict for keyword ones.
      compiler_params: see `CompilerParams`.
      interpret: None: the emulator, but on a TPU the SparseCores. True or
        `InterpretParams`: the emulator. False: the SparseCores.
      cost_estimate, metadata: hints for other compilers, which this one does not use.
      debug: whether to print the traced body.
      name: name of the kernel; default: that of the body.

    Returns:
      A function from arrays to results, or a decorator.

    Raises:
      KernelError and its subclasses: the body is invalid.
      OutOfResources: the body does not fit the chip.
      NoGpuError: interpret=False without a TPU.

    Example:
      >>> mesh = plsc.VectorSubcoreMesh(core_axis_name="c", subcore_axis_name="s")
      >>> @plsc.kernel(
      ...     out_type=jax.ShapeDtypeStruct((512, 128), jnp.float32), mesh=mesh
      ... )
      ... def lookup(table_ref, rows_ref, out_ref): ...
    """
    if body is _MISSING:
        options = {k: v for k, v in locals().items() if k != "body"}
        return functools.partial(kernel, **options)
    if expect.is_sequence(body) or expect.is_sequence(mesh):
        body, mesh = kinds.together(body, mesh)
    expect.function(body, "kernel: body")
    name = str(name or getattr(body, "__name__", "kernel"))
    params = compiler_params or CompilerParams()
    with scope.locating(body):
        interpret = interpretation(interpret)
        check_types(out_type, f"kernel {name}: out_type")
        for leaf in jax.tree.leaves(scratch_types, is_leaf=is_declaration):
            require_declaration(leaf)
        full = with_scratch(body, scratch_types, (), f"kernel {name}")
    kept = repeated.Kept((body,), interpret)
    tracer = functools.partial(_traced, body)

    def call(*args: Any) -> Any:
        return launch_body(
            full, args, out_type, mesh=mesh, name=name, compiler_params=params,
            interpret=interpret, debug=debug, kept=kept, tracer=tracer,
        )  # fmt: skip

    return over_arrays.OverArrays(call, body, kept)


def _traced(
    author: Callable[..., Any],
    body: Callable[..., Any],
    arrays: Arrays,
    mesh: Any,
    name: str,
    params: CompilerParams,
    _: bool,
) -> Traced:
    """Traces a body for the chip that runs it, and checks it; see `Tracer`."""
    sources = [x for x in arrays.sources if x is not None]
    if len({*map(id, sources)}) < len(sources):
        raise errors.UnsupportedError(
            f"kernel {name}: a jax.Ref is passed twice",
            expected="one argument for each reference",
            got="two arguments that are one array",
            hint="use one parameter of the body for it",
        )
    with chips.tracing_for(params.target), scope.locating(author):
        chip = chips.current()
        mesh, params = mesh.of_chip(chip), dataclasses.replace(params, target=chip.name)
        jaxpr = trace.trace_body(body, arrays, mesh, name)
        for own, its_mesh in kinds.of_each_kind(jaxpr, mesh):
            starts = Starts(region_of(own), its_mesh.axes)
            kernel = Kernel(name, its_mesh, params, chip, starts)
            check.check(own, kernel, len(arrays.inputs))
    return arrays.call(jaxpr, mesh, name, params), ()
