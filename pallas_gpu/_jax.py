# SPDX-License-Identifier: Apache-2.0
"""The only file that uses JAX's private modules, and that depends on the JAX version.

Public forms are used where they exist. All other modules import these names instead of
`jax._src`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax._src import array as _array
from jax._src import callback as _callback
from jax._src import config as _config
from jax._src import core as _core
from jax._src import debugging as _debugging
from jax._src import dispatch as _dispatch
from jax._src import ffi as _ffi
from jax._src import source_info_util as _source_info_util
from jax._src import traceback_util as _traceback_util
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import lax as _lax
from jax._src.lax import slicing as _slicing
from jax._src.lax import special as _special
from jax._src.lax.control_flow import conditionals as _conditionals
from jax._src.state import indexing as _indexing
from jax._src.state import primitives as _state_primitives
from jax._src.state import types as _state_types
from jax.experimental import hijax as _hijax
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.interpreters import ad, batching, mlir

AbstractRef = jax.ref.AbstractRef
TransformedRef = _state_types.TransformedRef
NDIndexer = _indexing.NDIndexer
Slice = _indexing.Slice
TransposeTransform = _state_types.TransposeTransform
Transform = _state_types.Transform
ReshapeTransform = _state_types.ReshapeTransform
BitcastTransform = _state_types.BitcastTransform

get_p = _state_primitives.get_p
swap_p = _state_primitives.swap_p
addupdate_p = _state_primitives.addupdate_p
debug_print_p = _debugging.debug_print_p

Primitive = jex_core.Primitive
# Used in isinstance and as types: a `type` statement would not permit the former.
Jaxpr: TypeAlias = jex_core.Jaxpr  # noqa: UP040
ClosedJaxpr: TypeAlias = jex_core.ClosedJaxpr  # noqa: UP040
JaxprEqn: TypeAlias = jex_core.JaxprEqn  # noqa: UP040
Var = jex_core.Var
Literal = jex_core.Literal
Effect = jex_core.Effect
# Of foreign calls with side effects. It can be exported, which others cannot.
FfiEffect = _ffi.FfiEffect
ReadEffect = _state_types.ReadEffect
# Of what depends on the position on an axis.
NamedAxisEffect = _core.NamedAxisEffect
ShapedArray = jax.core.ShapedArray
# The class of arrays that are not traced.
ArrayImpl = _array.ArrayImpl
DropVar = _core.DropVar

# Removes JAX's and this package's frames from tracebacks of errors.
api_boundary = _traceback_util.api_boundary
# A key of JAX's options that a trace depends on, such as `jax_enable_x64`.
trace_context = _config.trace_context
enable_debug_checks = _config.jax_pallas_enable_debug_checks
# Evaluates a jaxpr in the current trace; equations keep their source lines.
eval_jaxpr = jax.core.eval_jaxpr
# Evaluates what is called in it, also while a function is being traced.
outside_of_traces = _core.eval_context
convert_constvars_jaxpr = _partial_eval.convert_constvars_jaxpr
jaxprs_in_params = _core.jaxprs_in_params

_JAX_DIR = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
_PACKAGE_DIR = os.path.dirname(os.path.abspath(__file__))
source_info_util.register_exclusion(_PACKAGE_DIR)
_traceback_util.register_exclusion(_PACKAGE_DIR)


@contextlib.contextmanager
def trace_without_ref_rules() -> Iterator[None]:
    """Disables JAX's restrictions on references, which do not apply to kernels.

    In a kernel one reference may be passed twice, be a loop carry, or be both closed
    over and passed: references there are hardware memory, not JAX values.
    """
    with _config.mutable_array_checks(False), _type_checks_off_if_needed():
        yield


# From 0.12 on JAX's type checks (`jax_enable_checks`) refuse one reference as two
# operands, whatever `mutable_array_checks` is: bodies are then left to our own pass.
_CHECKS_REFUSE_BODIES = hasattr(_core, "check_distinct_refs")


def _type_checks_off_if_needed() -> contextlib.AbstractContextManager[None]:
    if _CHECKS_REFUSE_BODIES:
        return _config.enable_checks(False)
    return contextlib.nullcontext()


def trace(
    fn: Callable[..., Any],
    avals: Sequence[Any],
    axis_sizes: Sequence[tuple[str, int]] = (),
) -> tuple[ClosedJaxpr, Any]:
    """Traces `fn` over abstract values; returns the closed jaxpr and the output tree.

    Outer tracers and arrays that `fn` closes over become the jaxpr's consts.
    """
    out_tree: list[Any] = []

    def flat(*args):
        leaves, tree = jax.tree.flatten(fn(*args))
        out_tree.append(tree)
        return leaves

    # make_jaxpr caches by function identity; `flat` is new each time. The name appears
    # in the debug info of JAX's messages.
    flat.__name__ = getattr(fn, "__name__", "kernel")
    # So are the file and the line, which are the author's.
    flat.__wrapped__ = fn  # type: ignore[attr-defined]
    # A loop of a kernel remains a loop where JAX's jit is disabled.
    with trace_without_ref_rules(), _outside_of_shard_map(), jax.disable_jit(False):
        closed = jax.make_jaxpr(flat, axis_env=list(axis_sizes) or None)(*avals)
    return closed, out_tree[0]


def escaped_from(value: Any) -> str | None:
    """Returns where a value was made if the trace that it belongs to has ended.

    It is then a value of a branch, a loop or another kernel, and means nothing here.
    """
    trace = getattr(value, "_trace", None)
    frame = getattr(trace, "frame", None)
    if frame is None or getattr(frame, "tracing_eqns", None) != []:
        return None
    # One that goes on without equations so far surrounds this one.
    around = _core.trace_ctx.trace
    while around is not None:
        if around is trace:
            return None
        around = getattr(around, "parent_trace", None)
    line = getattr(value, "_line_info", None)
    return (line and where(line)) or "a function that has ended"


@contextlib.contextmanager
def _outside_of_shard_map() -> Iterator[None]:
    """Hides the mesh of a surrounding `jax.shard_map`, whose types are not a body's.

    JAX would otherwise convert operands in the body between types that vary over the
    mesh and types that do not.
    """
    mesh, no_mesh = mesh_around(), jax.sharding.AbstractMesh((), ())
    hidden = _HIDDEN_MESH.set(mesh)
    try:
        with _config._check_vma(False), jax.sharding.use_abstract_mesh(no_mesh):
            yield
    finally:
        _HIDDEN_MESH.reset(hidden)


_HIDDEN_MESH: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "pallas_gpu_hidden_mesh", default=None
)


def mesh_around() -> Any:
    """Returns the mesh around the code that is being traced; None for no mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return _HIDDEN_MESH.get() if mesh.empty else mesh


def vary_alike(operands: Sequence[Any]) -> list[Any]:
    """Converts operands to vary over the union of their axes of `jax.shard_map`."""
    axes = _varying(jax.typeof(x) for x in operands)
    return [
        jax.lax.pcast(x, tuple(sorted(missing)), to="varying")
        if (missing := axes - _varying([jax.typeof(x)]))
        else x
        for x in operands
    ]


def enclosing_axes() -> dict[Any, int]:
    """Returns names and sizes of the axes that `jax.lax.axis_index` knows here."""
    return dict(_core.get_axis_env().axis_sizes)


def results_vary_with(operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Returns results' types that vary over the operands' axes of `jax.shard_map`."""
    axes = _varying(operands)
    if not axes:
        return list(results)
    varying = jax.sharding.ManualAxisType(varying=axes)
    mesh = jax.sharding.get_abstract_mesh()
    return [
        ShapedArray(
            x.shape,
            x.dtype,
            sharding=jax.sharding.NamedSharding(mesh, jax.P(*[None] * x.ndim)),
            manual_axis_type=varying,
        )
        for x in results
    ]


def _varying(avals: Iterable[Any]) -> frozenset[str]:
    return frozenset[str]().union(*(x.manual_axis_type.varying for x in avals))


def check_types_under_axes(
    primitive: Any, axes: Callable[[dict[str, Any]], Sequence[tuple[str, int]]]
) -> None:
    """Makes JAX check a primitive's jaxprs (`jax_enable_checks`) with its axes bound.

    Args:
      primitive: a primitive that binds axis names in the jaxprs of its parameters.
      axes: maps the parameters of an equation to names and sizes of these axes.
    """

    def rule(_, *operands, **params):
        avals = [x.aval for x in operands]
        if _CHECKS_REFUSE_BODIES:
            return primitive.abstract_eval(*avals, **params)
        with trace_without_ref_rules(), _core.extend_axis_env_nd(axes(params)):
            return _core.check_eqn(primitive, avals, params)

    _core.custom_typechecks[primitive] = rule


def register_view(cls: type) -> None:
    """Lets JAX flatten a subclass of `TransformedRef` where it flattens that class.

    `jnp.ones_like` and `jnp.zeros_like` of a view look at the types in it.
    """
    _state_types.tracing_registry.register_dataclass_node(
        cls, ["ref", "transforms"], []
    )
    _state_types._registry[cls] = _state_types._registry[TransformedRef]


def is_eager() -> bool:
    """True where operations on arrays run at once, and nothing is being traced."""
    return _core.trace_ctx.is_top_level()


def splits_programs() -> bool:
    """True where JAX runs what is jitted operation by operation, or may do so."""
    return bool(
        _config.disable_jit.value
        or _config.debug_nans.value
        or _config.debug_infs.value
    )


def check_special(name: str, arrays: Sequence[jax.Array]) -> None:
    """Raises JAX's FloatingPointError under `jax_debug_nans` and `jax_debug_infs`."""
    try:
        _dispatch.check_special(name, arrays)
    except _dispatch.InternalFloatingPointError as error:
        raise FloatingPointError(
            f"invalid value ({error.ty}) encountered in {name}"
        ) from None


@contextlib.contextmanager
def around(eqn: JaxprEqn) -> Iterator[None]:
    """Sets the mesh of the `jax.shard_map` that an equation is traced in."""
    found = [x.aval.sharding.mesh for x in (*eqn.invars, *eqn.outvars)]
    mesh = next((mesh for mesh in found if mesh.manual_axes), None)
    if mesh is None:
        yield
        return
    sizes = [(name, mesh.shape[name]) for name in mesh.manual_axes]
    with jax.sharding.use_abstract_mesh(mesh), _core.extend_axis_env_nd(sizes):
        yield


def mesh_of_lowering(ctx: Any) -> jax.sharding.Mesh | None:
    """Returns the mesh of the `jax.shard_map` that a lowering rule is called in.

    None without one, and for an `AbstractMesh`, which has no devices.
    """
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    return mesh if isinstance(mesh, jax.sharding.Mesh) else None


def is_export(ctx: Any) -> bool:
    """True if a lowering rule is called by `jax.export`."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def is_partitioned(ctx: Any) -> bool:
    """True if XLA partitions the program that is lowered among known devices."""
    around = ctx.module_context.axis_context
    return len(getattr(around, "device_assignment", None) or ()) > 1


def lowers_with_devices(primitive: Any) -> None:
    """Has JAX tell the lowering rules of a primitive for which devices they lower."""
    _dispatch.prim_requires_devices_during_lowering.add(primitive)


def is_tracer(x: Any) -> bool:
    """True for a value that is being traced."""
    return isinstance(x, jax.core.Tracer)


def known_value(x: Any) -> Any:
    """Returns what a traced value stands for: a constant, or the outermost tracer."""
    return x.full_lower() if is_tracer(x) else x


class Producer(NamedTuple):
    """The equation that a value has been traced from.

    Attributes:
      primitive, params: of the equation.
      operands: values in the same trace.
      position: of the value among the results.
    """

    primitive: Any
    params: dict[str, Any]
    operands: tuple[Any, ...]
    position: int


def producer(x: Any) -> Producer | None:
    """Returns the equation of a value that is being traced; None for an argument."""
    made = getattr(x, "parent", None)
    if made is None:
        return None
    position = next(i for i, var in enumerate(made.outvars) if var is x.val)
    return Producer(made.primitive, made.params, tuple(made.in_tracers), position)


def literal(x: Any) -> Any:
    """Returns the number of a value that is traced as a literal; others as they are."""
    val = getattr(x, "val", None)
    return val.val if isinstance(val, Literal) else x


def unmapped(x: Any) -> tuple[Any, int]:
    """Returns what `jax.vmap` maps over to pass `x`, and the number of mapped axes."""
    levels = 0
    while isinstance(x, _batching.BatchTracer):
        levels += x.batch_dim is not None
        x = x.val
    return x, levels


def allow_effect_in_control_flow(effect_type: type) -> None:
    """Registers an effect class as allowed in loops, branches and jit."""
    _hijax.control_flow_allowed_effects.add_type(effect_type)
    mlir.lowerable_effects.add_type(effect_type)


def where(eqn_or_source_info: Any) -> str | None:
    """Returns `file:line (function)` of an equation's user frame."""
    found = file_and_line(eqn_or_source_info)
    if found is None:
        return None
    file_name, line, function = found
    return f"{short_path(file_name)}:{line} ({function})"


def scopes_of(eqn: JaxprEqn) -> tuple[str, ...]:
    """Returns the names of the `jax.named_scope`s around an equation, outermost first.

    They are those of the innermost jaxpr. `jnp.einsum` opens one by itself, which does
    not count: its name is the formula.
    """
    stack = eqn.source_info.name_stack.stack
    names = [x.name for x in stack if isinstance(x, _source_info_util.Scope)]
    return tuple(name for name in names if "->" not in name)


def is_of_jax(jaxpr: Any) -> bool:
    """True for a jaxpr that was traced from a function of JAX's own."""
    file = getattr(jaxpr.debug_info, "func_filename", None)
    return file is not None and file.startswith(_JAX_DIR)


def short_path(file_name: str) -> str:
    """Returns a file's name relative to the current folder, if it is inside."""
    # The current folder may be on another drive, or not exist any more.
    with contextlib.suppress(ValueError, OSError):
        relative = os.path.relpath(file_name)
        if not relative.startswith(".."):
            return relative
    return file_name


def where_now() -> str | None:
    """Returns `file:line (function)` of the user code that is running."""
    return where(_source_info_util.current())


def file_and_line(eqn_or_source_info: Any) -> tuple[str, int, str] | None:
    """Returns (file, line, function) of an equation's user frame."""
    info = getattr(eqn_or_source_info, "source_info", eqn_or_source_info)
    frame = _source_info_util.user_frame(info.traceback)
    if frame is None:
        return None
    return frame.file_name, frame.start_line, frame.function_name


def indexer(indices: Sequence[Any], arrays: Sequence[int], shape: Sequence[int]) -> Any:
    """Builds an index transform without JAX's own bounds check.

    A TMA copy may exceed the bounds of an array, which JAX's validation would reject.

    Args:
      indices: slices, scalars, and arrays of one shape.
      arrays: that shape; () without arrays.
      shape: of what is indexed.
    """
    return NDIndexer(tuple(indices), tuple(shape), tuple(arrays), validate=False)


def scan_arity(params: dict[str, Any]) -> tuple[int, int]:
    """Returns (number of consts, number of carries) of a scan equation.

    JAX 0.11.2 and later represent the groups of operands as flat trees (`ft_in`); older
    equations have the two numbers as parameters.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def log_no_failed_callback(is_reported: Callable[[BaseException], bool]) -> None:
    """Stops JAX from logging certain exceptions of `pure_callback`, which it raises."""

    def passes(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return error is None or not is_reported(error)

    _callback.logger.addFilter(passes)


@contextlib.contextmanager
def at_line_of(eqn: JaxprEqn) -> Iterator[None]:
    """Gives what is traced the source line of an equation, if it has one.

    An equation of a jitted function of JAX has none: it keeps the line of its call.
    """
    info = eqn.source_info
    if where(info) is None:
        yield
        return
    with source_info_util.user_context(info.traceback, name_stack=info.name_stack):
        yield


def bind_again(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Binds an equation's primitive to other operands; returns a list of results."""
    params = eqn.primitive.get_bind_params(eqn.params)
    results = eqn.primitive.bind(*operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _of_hi_primitive(eqn: JaxprEqn) -> Callable[..., list[Any]]:
    return functools.partial(eqn.primitive.to_lojax, **eqn.params)


def _polynomial(x: Any, *coefficients: Any) -> list[Any]:
    """Horner's rule, the constant term first."""
    *lower, result = coefficients
    for coefficient in reversed(lower):
        result = result * x + coefficient
    return [result]


# What an equation computes, in operations that every version has, by its primitive.
# From 0.12 on there is `polynomial`, and functions of `jax.numpy` are hi primitives:
# those of `jax.experimental.hijax`, which say themselves what they consist of.
EXPANSIONS: dict[str, Callable[[JaxprEqn], Callable[..., list[Any]]]] = {
    "call_hi_primitive": _of_hi_primitive,
    "polynomial": lambda _: _polynomial,
}


def threefry2x32(*words: Any) -> list[Any]:
    """Returns the two words that the hash of JAX's random numbers makes of four."""
    return list(jex_core.primitives.threefry2x32_p.bind(*words))


def special_function(name: str) -> Callable[..., Any]:
    """Returns JAX's definition of a function, which consists of operations of lax."""
    definition = getattr(_special, f"{name}_impl")

    def function(*operands: Any) -> Any:
        narrow = operands[0].dtype
        wide = jax.numpy.promote_types(narrow, jax.numpy.float32)
        result = definition(*(x.astype(wide) for x in operands), dtype=wide)
        return result.astype(narrow)

    return function


def consts_of(jaxpr: Any) -> list[Any]:
    """Returns the consts of a jaxpr, open or closed."""
    return list(getattr(jaxpr, "consts", ()))


def source_of(jaxpr: Any) -> str:
    """Returns `name at file:line` of the function that was traced, or its name."""
    return str(jaxpr.debug_info.func_src_info)


def pallas_call_primitive() -> Any:
    """Returns the primitive of JAX's own `pallas_call`; None if nobody imported it.

    This package does not import it.
    """
    # Importing a module enters it into its package.
    return getattr(vars(jax.experimental).get("pallas"), "pallas_call_p", None)


def override_lowering(primitive: Any, platform: str, rule: Callable[..., Any]) -> None:
    """Registers `rule(default, ctx, *operands, **params)` for a platform.

    `default` is the lowering that the primitive has for all platforms.
    """
    default = _mlir._lowerings[primitive].rule
    mlir.register_lowering(
        primitive, functools.partial(rule, default), platform=platform
    )


@functools.cache
def _primitives_by_name() -> dict[str, Any]:
    def body(x):
        f = jax.jit(lambda y: y + 1)
        g = jax.custom_jvp(lambda y: y)
        g.defjvp(lambda p, t: (p[0], t[0]))
        h = jax.custom_vjp(lambda y: y)
        h.defvjp(lambda y: (y, None), lambda _, ct: (ct,))
        x = jax.lax.optimization_barrier(f(g(h(x))))
        x = jax.checkpoint(lambda y: y + 1)(x)
        x = jax.lax.fori_loop(0, 2, lambda _, y: y + 1, x)
        x = jax.lax.while_loop(lambda y: y < 0, lambda y: y, x)
        x = jax.lax.cond(x > 0, lambda: x, lambda: -x)
        return x, jax.lax.axis_index("i")

    closed = jax.make_jaxpr(body, axis_env=[("i", 1)])(1.0)
    found = {eqn.primitive.name: eqn.primitive for eqn in closed.eqns}
    public = vars(jex_core.primitives).values()
    # split, stack, tile, some scatters and platform_index have no public name.
    modules = _lax, _slicing, _conditionals
    others = [value for module in modules for value in vars(module).values()]
    ours = get_p, swap_p, addupdate_p, ad.add_jaxvals_p
    for primitive in (*ours, *public, *others):
        if isinstance(primitive, Primitive):
            found.setdefault(primitive.name, primitive)
    return found


def primitive_by_name(name: str) -> Any:
    """Returns a primitive of JAX by its name, in whichever module it is defined."""
    found = _primitives_by_name()
    if name not in found:
        name = _OTHER_NAMES.get(name, name)
    return found[name]


# Names of primitives in some of the supported versions of JAX.
_OTHER_NAMES = {"jit": "pjit", "checkpoint": "remat2"}
