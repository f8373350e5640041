# SPDX-License-Identifier: Apache-2.0
"""`kernel`: the entry point for kernels that run on SparseCores."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_gpu import _jax, errors, expect, types
from pallas_gpu.entry import call, mutable, over_arrays, scope
from pallas_gpu.entry.caching import captured
from pallas_gpu.entry.kernel import check_types, interpretation, with_scratch
from pallas_gpu.entry.scoped import is_declaration
from pallas_gpu.sparsecore import check
from pallas_gpu.sparsecore.check.kernel import Kernel
from pallas_gpu.sparsecore.check.starts import Starts
from pallas_gpu.sparsecore.entry import kinds, trace
from pallas_gpu.sparsecore.primitives.scoped import require_declaration
from pallas_gpu.sparsecore.types import (
    CompilerParams,
    ScalarSubcoreMesh,
    VectorSubcoreMesh,
    chips,
)
from pallas_gpu.types import values

_MISSING: Any = object()
# Traces that a kernel keeps, one for each combination of argument types.
_KEPT_TRACES = 64
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
    launch = _Launch(body, full, out_type, mesh, name, params, interpret, debug, {})
    return over_arrays.OverArrays(lambda *args: launch(args), body)


@dataclasses.dataclass(frozen=True, eq=False)
class _Launch:
    """A kernel, and the bodies that it has traced for types of arguments."""

    author: Callable[..., Any]
    body: Callable[..., Any]
    out_type: Any
    mesh: Any
    name: str
    params: CompilerParams
    interpret: Any
    debug: bool
    cache: dict[Any, Any]

    def __call__(self, args: Sequence[Any]) -> Any:
        given, in_tree = jax.tree.flatten(tuple(args), is_leaf=mutable.is_view)
        what = f"kernel {self.name}: an argument"
        flat = [values.array(mutable.initial(x, self.name), what) for x in given]
        outs, out_tree = jax.tree.flatten(self.out_type)
        # What is updated in place is a result, too.
        updated = [i for i, x in enumerate(given) if mutable.is_mutable(x)]
        self._require_different([given[i] for i in updated], given)
        types_ = (*flat, *outs, *(flat[i] for i in updated))
        avals = [_jax.ShapedArray(x.shape, x.dtype) for x in types_]
        with chips.tracing_for(self.params.target), scope.locating(self.author):
            chip = chips.current()
            mesh = self.mesh.of_chip(chip)
            options: Any = dataclasses.replace(self.params, target=chip.name)
            jaxpr = self._traced(
                avals, tuple(updated), in_tree, out_tree, mesh, options
            )
        launch = call.CallParams(
            jaxpr=jaxpr,
            mesh=mesh,
            batch=(),
            out_avals=tuple(avals[len(flat) :]),
            compiler_params=options,
            interpret=call.resolve_interpret(self.interpret),
            name=self.name,
            aliases=tuple((i, len(outs) + k) for k, i in enumerate(updated)),
        )
        results = call.kernel_p.bind(*_jax.vary_alike(flat), **launch.as_dict())
        found = zip(updated, results[len(outs) :], strict=True)
        mutable.update([(given[i], value) for i, value in found], self.name)
        return jax.tree.unflatten(out_tree, results[: len(outs)])

    def _require_different(self, refs: Sequence[Any], given: Sequence[Any]) -> None:
        """Raises for a reference that is passed twice, or in parts."""
        mutable.require_no_overlap(given, refs, self.name)
        if len({id(ref) for ref in refs}) < len(refs):
            raise errors.UnsupportedError(
                f"kernel {self.name}: a jax.Ref is passed twice",
                expected="one argument for each reference",
                got="two arguments that are one array",
                hint="use one parameter of the body for it",
            )

    def _traced(
        self,
        avals: Any,
        updated: tuple[int, ...],
        in_tree: Any,
        out_tree: Any,
        mesh: Any,
        options: Any,
    ) -> _jax.Jaxpr:
        seen = captured.captured((self.author,))
        key = (tuple(avals), updated, in_tree, options.target, _jax.trace_context())
        before, jaxpr = self.cache.get(key, (None, None))
        if jaxpr is not None and before == seen:
            return jaxpr
        flat_body = _over_flat_refs(
            self.body, in_tree, out_tree, self.out_type, updated
        )
        jaxpr = trace.trace_body(flat_body, avals, mesh, self.name)
        for own, its_mesh in kinds.of_each_kind(jaxpr, mesh):
            starts = Starts(own, its_mesh.axes)
            kernel = Kernel(self.name, its_mesh, options, chips.current(), starts)
            check.check(own, kernel, in_tree.num_leaves)
        if len(self.cache) >= _KEPT_TRACES:
            self.cache.pop(next(iter(self.cache)))
        self.cache[key] = seen, jaxpr
        if self.debug:
            print(f"kernel {self.name}:\n{jaxpr}")
        return jaxpr


def _over_flat_refs(
    body: Any, in_tree: Any, out_tree: Any, out_type: Any, updated: tuple[int, ...]
) -> Any:
    """Restores the pytrees of arguments; flattens a tuple of results, as upstream.

    The reference to an argument that is updated in place is that of its result.
    """
    spread = isinstance(out_type, (tuple, list))

    @functools.wraps(body)
    def flat_body(*refs: Any) -> Any:
        n_in, n_out = in_tree.num_leaves, out_tree.num_leaves
        given, results = list(refs[:n_in]), refs[n_in : n_in + n_out]
        for i, ref in zip(updated, refs[n_in + n_out :], strict=True):
            given[i] = ref
        inputs = jax.tree.unflatten(in_tree, given)
        outputs = jax.tree.unflatten(out_tree, results)
        return body(*inputs, *(outputs if spread else (outputs,)))

    return flat_body
