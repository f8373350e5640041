# SPDX-License-Identifier: Apache-2.0
"""`kernel`: the entry point for kernels over references."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, arch, errors, expect, types
from pallas_gpu.checks import equations, references
from pallas_gpu.entry import (
    assumed_target,
    call,
    expand,
    mutable,
    over_arrays,
    profiling,
    scope,
    trace,
    warp,
)
from pallas_gpu.entry.caching import captured, repeated
from pallas_gpu.entry.scoped import called, is_declaration, require_declaration
from pallas_gpu.types import values

_MISSING: Any = object()


def interpretation(value: Any) -> Any:
    """Accepts what `interpret` can be."""
    is_known = value is None or isinstance(value, bool | types.InterpretParams)
    if is_known or (isinstance(value, str) and value == "emitted"):
        return value
    raise errors.ArgumentTypeError(
        "invalid value of interpret",
        expected='None, True, False, "emitted" or InterpretParams(...)',
        got=expect.shown(value),
        hint="None runs in the emulator on a CPU and on the GPU if there is one",
    )


PARAMS = expect.optional(
    expect.instance(types.CompilerParams, written="plgpu.CompilerParams(...)")
)


# Arguments of other functions, with what to write instead.
_SPECS = "block specs are arguments of plgpu.pallas_call"


@expect.arguments(
    None,
    {
        **over_arrays.LAUNCH,
        "in_specs": _SPECS,
        "out_specs": _SPECS,
        "grid_spec": _SPECS,
    },
    grid=expect.anything,
    grid_names=expect.anything,
    cluster=expect.anything,
    cluster_names=expect.anything,
    num_threads=expect.anything,
    thread_name=expect.anything,
    mesh=expect.optional(
        expect.instance(types.Mesh, types.WarpMesh, written="plgpu.Mesh(grid=...)")
    ),
    compiler_params=PARAMS,
)
def kernel(
    body: Callable[..., None] = _MISSING,
    out_shape: Any = None,
    *,
    out_type: Any = None,
    scratch_types: Any = None,
    scratch_shapes: Any = None,
    grid: Sequence[int] = (),
    grid_names: Sequence[str] = (),
    cluster: Sequence[int] = (),
    cluster_names: Sequence[str] = (),
    num_threads: int | None = None,
    thread_name: str | None = None,
    mesh: types.Mesh | types.WarpMesh | None = None,
    compiler_params: types.CompilerParams | None = None,
    interpret: bool | str | types.InterpretParams | None = None,
    debug: bool = False,
    name: str | None = None,
    kernel_name: str | None = None,
    cost_estimate: Any = None,
    metadata: dict[str, str] | None = None,
) -> Callable[..., Any]:
    """Turns a function over references into a function over arrays.

    The body runs once for each position on the grid, cluster and thread axes;
    `lax.axis_index(name)` returns its position. Arguments and results are references in
    GMEM, followed by scratch references. An argument that `jax.new_ref` has made, or
    one that the body closes over, is updated in place. Composes with `jax.jit`,
    `jax.vmap`, `lax.scan` and `lax.cond`.

    Issued by: the host. It completes like any JAX operation.

    Args:
      body: `body(*input_refs, *output_refs, *scratch_refs) -> None`. If omitted,
        `kernel` returns a decorator.
      out_type: pytree of `jax.ShapeDtypeStruct` for the results. On a GPU, elements
        that the kernel does not store are undefined; in the emulator they are an error.
      scratch_types: sequence of declarations for positional scratch references, or a
        dict for keyword ones.
      grid, grid_names: sizes and names of the grid axes.
      cluster, cluster_names: sizes and names of the cluster axes: the grid counts
        clusters, and CTAs of one cluster can access each other's SMEM and barriers.
      num_threads, thread_name: warpgroups per block and the name of their axis.
      mesh: grid, cluster and warpgroups as one `Mesh`, instead of the six arguments
        above. A `WarpMesh`: the decorated function runs in each warp of the calling
        warpgroup, with scratch of its own; it is called in the body of another kernel,
        and only `body`, `mesh` and `scratch_types` are given.
      compiler_params: see `CompilerParams`.
      interpret: None: the emulator on a CPU, the GPU if there is one. True or
        `InterpretParams`: the emulator. "emitted": the code that the kernel is lowered
        to, on the CPU. False: the GPU.
      debug: whether to print the traced body.
      name, kernel_name: name of the kernel; default: that of the mesh, else that of the
        body.
      cost_estimate, metadata: hints for other compilers, which this one does not use.
      out_shape, scratch_shapes: older spellings of out_type and scratch_types.

    Returns:
      A function from arrays to results, or a decorator.

    Raises:
      KernelError and its subclasses: the body is invalid.
      OutOfResources: the body does not fit the target (sm_90a if none is specified).
      NoGpuError: interpret=False without a GPU.
      UnwrittenResultError: in the emulator, elements of a result were not stored.

    Example:
      >>> @plgpu.kernel(out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
      ... def double(x_ref, o_ref):
      ...     o_ref[...] = x_ref[...] * 2
    """
    if body is _MISSING:
        options = {k: v for k, v in locals().items() if k not in ("body",)}
        return functools.partial(kernel, **options)
    given = (out_type, out_shape, scratch_types, scratch_shapes, compiler_params)
    types.refuse_foreign((*given, mesh, interpret), "kernel")
    axes: dict[str, Any] = {"grid": grid, "grid_names": grid_names, "cluster": cluster,
            "cluster_names": cluster_names, "num_threads": num_threads,
            "thread_name": thread_name}  # fmt: skip
    if isinstance(mesh, types.WarpMesh):
        _refuse_beside("a WarpMesh", {**axes, "out_type": out_type})
        own = _one_of("scratch_types", scratch_types, "scratch_shapes", scratch_shapes)
        in_scope = with_scratch(body, own or (), (), warp.OVER_WARPS)
        return warp.over_warps(in_scope, mesh)
    outputs = _results(_one_of("out_type", out_type, "out_shape", out_shape))
    scratch = _one_of("scratch_types", scratch_types, "scratch_shapes", scratch_shapes)
    scratch = () if scratch is None else scratch
    name = _one_of("name", name, "kernel_name", kernel_name)
    name = name or getattr(mesh, "kernel_name", None)
    name = str(name or getattr(body, "__name__", "kernel"))
    params = compiler_params or types.CompilerParams()
    with scope.locating(body):
        interpret = interpretation(interpret)
        given_as = "out_shape" if out_type is None else "out_type"
        check_types(outputs, f"kernel {name}: {given_as}")
        _refuse_semantics(params, name)
        if mesh is not None:
            _refuse_beside("a Mesh", axes)
        launched = types.Mesh(**axes) if mesh is None else mesh
        launched = dataclasses.replace(launched, kernel_name=name)
        full = with_scratch(body, scratch, launched.thread_name, f"kernel {name}")
    kept = repeated.Kept((body,), interpret)
    launch = functools.partial(
        launch_body,
        mesh=launched,
        name=name,
        compiler_params=params,
        interpret=interpret,
        debug=debug,
        kept=kept,
    )

    def call_with(*args: Any) -> Any:
        return launch(full, args, outputs)

    return over_arrays.OverArrays(call_with, body, kept)


def _one_of(name: str, value: Any, old_name: str, old_value: Any) -> Any:
    if value is not None and old_value is not None:
        raise errors.ArgumentError(
            f"kernel: {name} and {old_name} are the same argument",
            expected="one of them",
            got="both",
            hint=f"drop {old_name}",
        )
    return value if value is not None else old_value


def _refuse_beside(mesh: str, given: dict[str, Any]) -> None:
    """Raises for arguments that the mesh has, or that it cannot have."""
    both = [name for name, value in given.items() if value not in ((), None)]
    if both:
        raise errors.ArgumentError(
            f"kernel: {both[0]} is given beside {mesh}",
            expected="the axes in the mesh, or one by one",
            got=f"mesh and {', '.join(both)}",
            hint=f"drop {both[0]}, or the mesh",
            where=_jax.where_now(),
        )


def _results(out_type: Any) -> Any:
    if out_type is not None:
        return out_type
    raise errors.ArgumentTypeError(
        "kernel: out_type is missing",
        expected="the types of the results",
        got="out_type=None",
        hint="pass out_type=jax.ShapeDtypeStruct(shape, dtype), or a pytree of them",
    )


def with_scratch(
    body: Callable[..., None], scratch: Any, threads: Any, who: str
) -> Callable[..., None]:
    """Wraps the body in one scope that allocates its scratch memory.

    Args:
      threads: the axis whose threads have it together, if there is one.
      who: the caller, for messages.
    """
    positional, named = scratch_of(scratch)
    if not positional and not named:
        return functools.wraps(body)(functools.partial(scope.call, who, body))

    @functools.wraps(body)
    def in_scope(*refs):
        return called(body, refs, positional, named, threads or (), who)

    return in_scope


def scratch_of(scratch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the declarations that are passed by position, and those by name."""
    for leaf in jax.tree.leaves(scratch, is_leaf=is_declaration):
        require_declaration(leaf)
    if isinstance(scratch, dict):
        expect.names(tuple(scratch), "a key of the scratch declarations")
        return (), scratch
    if scratch is None or isinstance(scratch, list | tuple):
        return tuple(scratch or ()), {}
    require_declaration(scratch)
    return (scratch,), {}


def _refuse_semantics(params: types.CompilerParams, name: str) -> None:
    for field in ("dimension_semantics", "max_concurrent_steps", "block_memory_space"):
        if getattr(params, field) != getattr(types.CompilerParams(), field):
            raise errors.UnsupportedError(
                f"kernel {name}: {field} is for pallas_call",
                expected="CompilerParams without it: the axes of a kernel are parallel",
                got=getattr(params, field),
                hint="leave it out, or use plgpu.emit_pipeline in the body",
            )


# `tracer(body, arrays, mesh, name, params, like_upstream)` traces a body.
Tracer = Callable[..., trace.Traced]


def launch_body(
    body: Callable[..., None],
    args: Sequence[Any],
    out_type: Any,
    *,
    mesh: Any,
    name: str,
    compiler_params: Any,
    interpret: Any,
    debug: bool,
    kept: repeated.Kept,
    aliases: Sequence[tuple[int, int]] = (),
    tracer: Tracer | None = None,
) -> Any:
    """Traces a body over the arguments' types and binds the kernel primitive.

    `kept` keeps the trace for the types, as long as its functions, those of the author
    that the body calls, capture the same values. `aliases` are pairs (argument, result)
    of leaves that are one array, of which the body gets one reference. `tracer` is that
    of the machine; by default that of GPUs.
    """
    given, in_tree = jax.tree.flatten(tuple(args), is_leaf=mutable.is_view)
    what = f"kernel {name}: an argument"
    flat = [values.array(mutable.initial(x, name), what) for x in given]
    sources = [x if mutable.is_mutable(x) else None for x in given]
    out_leaves, out_tree = jax.tree.flatten(out_type)
    out_avals = [_out_aval(x, f"kernel {name}: a result") for x in out_leaves]
    seen = kept.captured()
    written = any(x is not None for x in sources) or captured.has_mutable(seen)
    if out_avals and not written and not any(aval.size for aval in out_avals):
        # Nothing to compute: a launch would only write results without elements.
        return _zeros(out_avals, out_tree)
    in_avals = [jax.core.ShapedArray(x.shape, x.dtype) for x in flat]
    # Which arguments are references, and which of these are the same one.
    same = tuple(None if x is None else _position(x, given) for x in sources)
    interpret = call.resolve_interpret(interpret)
    like_upstream = getattr(interpret, "like_upstream", False)
    key = (tuple(in_avals), in_tree, same, like_upstream, _jax.trace_context(),
           _jax.enable_debug_checks.value)  # fmt: skip
    before, *found = kept.traces.get(key, (None,))
    if not found or before != seen:
        arrays = trace.Arrays.of(in_avals, out_avals, aliases, sources)
        flat_body = _over_flat_refs(body, in_tree, out_tree, out_type)
        found = (tracer or traced_for_gpu)(
            flat_body, arrays, mesh, name, compiler_params, like_upstream
        )
        if not found[1]:
            kept.add_trace(key, (seen, *found))
        if debug:
            print(f"kernel {name}:\n{found[0].jaxpr}")
    params, around = found
    params = dataclasses.replace(params, interpret=interpret)
    given += around
    updated = {j: given[i] for i, j in params.aliases if j >= len(out_avals)}
    mutable.require_no_overlap(given, updated.values(), name)
    results = params.out_avals
    if 0 in params.mesh.grid or (results and not any(x.size for x in results)):
        # CUDA refuses an empty grid, and there is nothing to compute without elements.
        # Mistakes of the body do not depend on either.
        return _zeros(out_avals, out_tree)
    if not (written or around or params.compiler_params.profile_space):
        kept.add_launch(args, params, seen, out_tree)
    operands = _jax.vary_alike([*flat, *trace.lifted_operands(around)])
    made = profiling.bind(params, operands)
    mutable.update([(ref, made[j]) for j, ref in updated.items()], name)
    return jax.tree.unflatten(out_tree, made[: len(out_avals)])


def traced_for_gpu(
    body: Callable[..., None],
    arrays: trace.Arrays,
    mesh: types.Mesh,
    name: str,
    params: types.CompilerParams,
    like_upstream: bool,
    require: Callable[[_jax.Jaxpr, Sequence[Any]], None] = lambda *_: None,
) -> trace.Traced:
    """Traces a body for the target that it is compiled for, and checks resources.

    Without a target in the parameters or around the call, the default one is assumed
    first: a body that needs features of others is traced again for the first that has
    them, and its launch gets that as its target.

    Args:
      require: gets the trace, and its references to the results.
    """

    def traced(target: arch.GpuTarget) -> trace.Traced:
        with assumed_target.tracing_for(target):
            return trace.trace_body(body, arrays, mesh, name, params, like_upstream)

    target, needed = assumed_target.target_of(params.target), params.target
    made, around = traced(target)
    if needed is None and assumed_target.assumed_target() is None:
        features = equations.features(made.jaxpr)
        fits = [x for x in arch.TARGETS.values() if features <= x.features]
        if fits and target not in fits:
            target, needed = fits[0], fits[0].name
            made, around = traced(target)
    n_in = made.num_inputs
    require(made.jaxpr, made.jaxpr.invars[n_in : n_in + arrays.declared])
    checks = params.debug_checks or _jax.enable_debug_checks.value
    params = dataclasses.replace(params, target=needed, debug_checks=checks)
    made = dataclasses.replace(made, compiler_params=params)
    with scope.locating(body):
        _require_resources(made, target)
    return made, around


def _zeros(avals: Sequence[Any], tree: Any) -> Any:
    """Returns the results of a kernel that is not launched."""
    return jax.tree.unflatten(tree, [jnp.zeros(x.shape, x.dtype) for x in avals])


def _position(x: Any, among: Sequence[Any]) -> int:
    return next(i for i, y in enumerate(among) if y is x)


def _require_resources(params: call.CallParams, target: arch.GpuTarget) -> None:
    """Refuses kernels that exceed the target's resources, also in the emulator."""
    _require_cluster(params.mesh, target, params.name)
    equations.require_features(params.jaxpr, target)
    if params.compiler_params.lowering_semantics is types.LoweringSemantics.Lane:
        references.require_transforms(params.jaxpr)
    expand.planned(params, target)


def _require_cluster(mesh: types.Mesh, target: arch.GpuTarget, name: str) -> None:
    blocks = math.prod(mesh.cluster)
    if blocks <= target.max_cluster_blocks:
        return
    raise errors.ArgumentError(
        f"kernel {name}: the cluster exceeds the maximum cluster size of {target.name}",
        expected=f"at most {target.max_cluster_blocks} blocks a cluster",
        got=f"{blocks}, cluster={mesh.cluster}",
        hint="use a smaller cluster and a larger grid",
    )


def check_types(results: Any, what: str) -> None:
    """Raises unless each leaf is the type of an array that a kernel can write."""
    for leaf in jax.tree.leaves(results):
        _out_aval(leaf, what)


def _out_aval(x: Any, what: str) -> Any:
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise errors.ArgumentTypeError(
            f"{what} contains a leaf that is not a type",
            expected="a pytree of jax.ShapeDtypeStruct(shape, dtype)",
            got=expect.shown(x),
            hint="write jax.ShapeDtypeStruct(shape, dtype)",
        )
    dtype = values.element_type(x.dtype, what)
    return jax.core.ShapedArray(expect.integers(0)(x.shape, what), dtype)


def _over_flat_refs(body, in_tree, out_tree, out_type):
    """Restores the pytrees of arguments; flattens a tuple of results, as upstream."""
    spread = isinstance(out_type, tuple | list)

    @functools.wraps(body)
    def flat_body(*refs):
        n_in = in_tree.num_leaves
        inputs = jax.tree.unflatten(in_tree, refs[:n_in])
        outputs = jax.tree.unflatten(out_tree, refs[n_in:])
        return body(*inputs, *(outputs if spread else (outputs,)))

    return flat_body
