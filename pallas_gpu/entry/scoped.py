# SPDX-License-Identifier: Apache-2.0
"""`run_scoped`, scratch memory within a part of a kernel; `get_global`, of a launch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_gpu import _jax, errors, expect, types
from pallas_gpu.entry import scope
from pallas_gpu.primitives.scoped import get_global_p, run_scoped_p
from pallas_gpu.program.rewrite import bound_body


def is_declaration(x: Any) -> bool:
    """True for a leaf of a pytree of declarations; None is an empty one, as in JAX."""
    return hasattr(x, "to_ref")


@expect.arguments()
def run_scoped[T](
    f: Callable[..., T],
    *types: Any,
    collective_axes: str | Sequence[str] = (),
    **kw_types: Any,
) -> T:
    """Calls `f` with freshly allocated scratch references.

    PTX: none; SMEM is allocated at compile time. Since: sm_90.

    Issued by a warpgroup, or by all of them together: with several warpgroups in a
    block, SMEM and barriers are shared by all, and `collective_axes` must name the
    thread axis. Inside `warp_map` it is issued by a warp, and each warp of the block
    has SMEM and barriers of its own. The contents are initially undefined.

    Args:
      f: function of one reference per declaration.
      *types: declarations: `SMEM(...)`, `Barrier(...)`, or pytrees of them.
      collective_axes: the name of the thread axis, if all warpgroups enter the scope.
      **kw_types: the same, passed by name.

    Returns:
      The result of `f`: values, not references.

    Raises:
      ArgumentTypeError: an argument is not a declaration.
      UnsupportedError: SMEM or barriers for one of several warpgroups; anything but
        SMEM and barriers inside warp_map.

    Example:
      >>> plgpu.run_scoped(lambda tile: ..., plgpu.SMEM((64, 64), jnp.float32))
    """
    return called(f, (), types, kw_types, collective_axes)


@expect.arguments()
def with_scoped(
    *types: Any,
    collective_axes: str | Sequence[str] = (),
    **kw_types: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator: `run_scoped` around each call of the decorated function.

    PTX: none; SMEM is allocated at compile time. Since: sm_90.

    Issued by whoever calls the decorated function, see `run_scoped`.

    Args:
      *types: declarations; their references follow the arguments of a call.
      collective_axes: see `run_scoped`.
      **kw_types: the same, passed by name.

    Raises:
      ArgumentTypeError: an argument is not a declaration.

    Example:
      >>> @plgpu.with_scoped(plgpu.SMEM((64, 64), jnp.float32))
      ... def copied(x_ref, tile): ...
      >>> copied(x_ref)
    """
    for leaf in jax.tree.leaves((types, kw_types), is_leaf=is_declaration):
        require_declaration(leaf)

    def decorate(f: Callable[..., Any]) -> Callable[..., Any]:
        expect.function(f, "with_scoped: the function")

        @functools.wraps(f)
        def call(*args: Any) -> Any:
            return called(f, args, types, kw_types, collective_axes)

        return call

    return decorate


@expect.arguments()
def get_global(what: Any) -> Any:
    """Returns memory that all CTAs of a launch share.

    PTX: none; the launch allocates it. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp. Each call in the kernel's
    source returns memory of its own, the same one whenever and wherever it runs; with
    `jax.vmap` each instance has its own. Accesses of different CTAs have to be ordered,
    by semaphores for instance.

    Args:
      what: a declaration: `SemaphoreType.REGULAR`, an array of semaphores such as
        `SemaphoreType.REGULAR((4,))`, or `GMEM(shape, dtype)`.

    Returns:
      The reference.

    Raises:
      ArgumentTypeError: not a declaration.
      MemorySpaceError: a declaration of memory that CTAs do not share.
      KernelError: called outside a kernel.

    Example:
      >>> ready = plgpu.get_global(plgpu.SemaphoreType.REGULAR)
    """
    mesh = scope.current_mesh("get_global")
    require_declaration(what)
    if what.memory_space not in (types.SEMAPHORES, types.GMEM):
        raise errors.MemorySpaceError(
            "get_global: CTAs do not share this memory",
            expected="semaphores, or an array in GMEM",
            got=types.describe(what.to_ref()),
            hint="declare it in scratch_types (pallas_call: scratch_shapes) or "
            "run_scoped",
        )
    what.check_scope(mesh)
    with _jax.trace_without_ref_rules():
        (ref,) = get_global_p.bind(what=what.to_ref())
    return ref


def called(
    f: Callable[..., Any],
    args: Sequence[Any],
    types: Sequence[Any],
    named: dict[str, Any],
    axes: str | Sequence[str] = (),
    who: str | None = None,
) -> Any:
    """`scoped` of an author's function, which gets other arguments first.

    Args:
      who: the caller, for messages; None: `run_scoped`.
    """
    names = parameter_names(f, (*args, *types), named)[len(jax.tree.leaves(args)) :]
    call = f if who is None else functools.partial(scope.call, who, f)
    return scoped(functools.partial(call, *args), types, named, axes, names)


def scoped(
    f: Callable[..., Any],
    scratch_types: Sequence[Any],
    named: dict[str, Any] | None = None,
    axes: str | Sequence[str] = (),
    names: Sequence[str] | None = None,
) -> Any:
    """`run_scoped` with a name for each declaration, for messages."""
    mesh = scope.current_mesh("run_scoped")
    axes = expect.names(axes, "run_scoped: collective_axes")
    declared = (tuple(scratch_types), named or {})
    leaves = jax.tree.leaves(declared, is_leaf=is_declaration)
    for leaf in leaves:
        require_declaration(leaf)
    refs = _fresh_refs(leaves)
    for leaf in leaves:
        leaf.check_scope(mesh)
    if isinstance(mesh, types.Mesh):
        _check_axes(mesh, axes, leaves)
    return _bind(f, declared, refs, axes, names)


def of_warpgroup(f: Callable[..., Any], *arrays: types.ScratchType) -> Any:
    """`run_scoped` of SMEM by a warpgroup, also by one of several of a block.

    Each warpgroup of the block has memory of its own, so nothing orders when they
    enter.
    """
    return _bind(f, (arrays, {}), _fresh_refs(arrays))


def _fresh_refs(leaves: Sequence[Any]) -> list[Any]:
    return [ref for i, leaf in enumerate(leaves) for ref in leaf.to_refs(i)]


def _bind(
    f: Callable[..., Any],
    declared: tuple[Sequence[Any], dict[str, Any]],
    refs: Sequence[Any],
    axes: tuple[str, ...] = (),
    names: Sequence[str] | None = None,
) -> Any:
    leaves, tree = jax.tree.flatten(declared, is_leaf=is_declaration)
    pairs = zip(leaves, names or [""] * len(leaves), strict=True)
    each = [name and name + path for leaf, name in pairs for path in leaf.paths()]

    def body(*flat):
        rest = iter(flat)
        bound = [leaf.bound([next(rest) for _ in leaf.paths()]) for leaf in leaves]
        positional, named = jax.tree.unflatten(tree, bound)
        return scope.call("run_scoped", f, *positional, **named)

    closed, out_tree = _jax.trace(body, refs)
    _require_values(closed.jaxpr.outvars)
    params = {"collective_axes": axes, "names": tuple(each)}
    return bound_body(run_scoped_p, closed, out_tree, **params)


def _require_values(outvars: Sequence[Any]) -> None:
    escaped = [v.aval for v in outvars if isinstance(v.aval, _jax.AbstractRef)]
    if escaped:
        raise errors.KernelError(
            "run_scoped: the function returns a reference",
            expected="values as results",
            got=types.describe(escaped[0]),
            hint="return its contents: ref[...]",
        )


def _check_axes(
    mesh: types.Mesh, axes: tuple[str, ...], declarations: Sequence[types.Declaration]
) -> None:
    own = [d for d in declarations if d.memory_space.per_warpgroup]
    if own and axes:
        raise errors.ArgumentError(
            "an accumulator is allocated by all warpgroups together",
            expected="a separate scope for each warpgroup, whose registers it uses",
            got=f"collective_axes={axes}",
            hint="declare the ACC in a run_scoped without collective_axes, in the code "
            "of the warpgroup that multiplies",
        )
    if scope.in_warp():
        if axes:
            raise errors.UnsupportedError(
                "run_scoped inside warp_map: warps cannot allocate together",
                expected="collective_axes=(): each warp has memory and barriers of its "
                "own",
                got=f"collective_axes={axes}",
                hint="allocate around the warp_map what its warps share",
            )
        return
    expected = () if mesh.thread_name is None else (mesh.thread_name,)
    if axes == expected or (axes == () and len(own) == len(declarations)):
        return
    if axes == () and mesh.warpgroups > 1:
        raise errors.UnsupportedError(
            "run_scoped: the block has several warpgroups, and only one would allocate",
            expected=f"collective_axes={mesh.thread_name!r}",
            got="collective_axes=()",
            hint="enter the scope with all warpgroups, or declare the scratch in "
            "scratch_types",
        )
    if axes:
        raise errors.ArgumentError(
            "run_scoped: collective_axes does not name the thread axis",
            expected=repr(mesh.thread_name) if expected else "no axis: one warpgroup",
            got=axes,
            hint="pass the kernel's thread_name, or omit collective_axes",
        )


def require_declaration(declaration: Any) -> None:
    """Raises ArgumentTypeError unless a scope can allocate it."""
    types.refuse_foreign(declaration, "scratch")
    if not hasattr(declaration, "to_ref") or isinstance(declaration, type):
        raise errors.ArgumentTypeError(
            "not a scratch declaration",
            expected="plgpu.SMEM(shape, dtype), plgpu.Barrier(), or pytrees of them",
            got=expect.shown(declaration),
            hint=f"call it: {declaration.__name__}(...)"
            if hasattr(declaration, "to_ref")
            else "declare an array with plgpu.SMEM(shape, dtype)",
        )


# --- the names by which an author's function knows its references ---------------------


def parameter_names(
    f: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> list[str]:
    """Returns a name for each leaf of `(args, kwargs)` in a call `f(*args, **kwargs)`.

    A leaf in a pytree has the parameter's name and its path: `buffers[0]`. The name is
    empty for an argument that the signature does not admit; the call reports that.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        (tuple(args), kwargs), is_leaf=lambda x: hasattr(x, "to_ref")
    )
    positional, rest = _positional(f)
    names = []
    for (kind, key, *path), _ in leaves:
        if kind.idx == 1:
            name = str(key.key)
        elif key.idx < len(positional):
            name = positional[key.idx]
        else:
            name = f"{rest}[{key.idx - len(positional)}]" if rest else ""
        names.append(name + jax.tree_util.keystr(tuple(path)) if name else "")
    return names


def _positional(f: Callable[..., Any]) -> tuple[list[str], str]:
    """Returns the positional parameters, and the name of `*args` or an empty one."""
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):
        return [], ""
    kinds = inspect.Parameter
    named = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    rest = [p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL]
    return [p.name for p in parameters if p.kind in named], "".join(rest)
