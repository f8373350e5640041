# SPDX-License-Identifier: Apache-2.0
"""`run_scoped`: scratch memory within a part of a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_gpu import _jax, errors, types
from pallas_gpu.entry import check, scope
from pallas_gpu.entry.names import parameter_names
from pallas_gpu.primitives.scoped import run_scoped_p


def run_scoped(
    f: Callable[..., Any],
    *scratch_types: Any,
    collective_axes: str | Sequence[str] = (),
    **named_scratch_types: Any,
) -> Any:
    """Calls `f` with freshly allocated scratch references.

    PTX: none; SMEM is allocated at compile time. Since: sm_90.

    Issued by a warpgroup, or by all of them together: with several warpgroups in a
    block, SMEM and barriers are shared by all, and `collective_axes` must name the
    thread axis. The contents are initially undefined.

    Args:
      f: function of one reference per declaration.
      *scratch_types: declarations: `SMEM(...)`, `Barrier(...)`, or pytrees of them.
      collective_axes: the name of the thread axis, if all warpgroups enter the scope.
      **named_scratch_types: the same, passed by name.

    Returns:
      The result of `f`: values, not references.

    Raises:
      ArgumentTypeError: an argument is not a declaration.
      UnsupportedError: SMEM or barriers for one of several warpgroups; a call inside
        warp_map.

    Example:
      >>> plgpu.run_scoped(lambda tile: ..., plgpu.SMEM((64, 64), jnp.float32))
    """
    names = parameter_names(f, scratch_types, named_scratch_types)
    return scoped(f, scratch_types, named_scratch_types, collective_axes, names)


def scoped(
    f: Callable[..., Any],
    scratch_types: Sequence[Any],
    named_scratch_types: dict[str, Any],
    collective_axes: str | Sequence[str],
    names: Sequence[str],
) -> Any:
    """`run_scoped` with a name for each declaration, for messages."""
    mesh = scope.current_mesh("run_scoped")
    if scope.in_warp():
        raise check.no_scope().with_location(_jax.where_now())
    axes = (collective_axes,) if isinstance(collective_axes, str) else collective_axes
    leaves, tree = jax.tree.flatten(
        (tuple(scratch_types), named_scratch_types),
        is_leaf=lambda x: hasattr(x, "to_ref"),
    )
    refs = [_to_ref(leaf) for leaf in leaves]
    _check_axes(mesh, tuple(axes), leaves)

    def body(*flat):
        positional, named = jax.tree.unflatten(tree, flat)
        return f(*positional, **named)

    closed, out_tree = _jax.trace(body, refs)
    _require_values(closed.jaxpr.outvars)
    jaxpr = _jax.convert_constvars_jaxpr(closed.jaxpr)
    with _jax.trace_without_ref_rules():
        flat = run_scoped_p.bind(
            *closed.consts,
            jaxpr=jaxpr,
            collective_axes=tuple(axes),
            names=tuple(names),
        )
    return jax.tree.unflatten(out_tree, flat)


def _require_values(outvars: Sequence[Any]) -> None:
    escaped = [v.aval for v in outvars if isinstance(v.aval, _jax.AbstractRef)]
    if escaped:
        raise errors.KernelError(
            "run_scoped: the function returns a reference",
            expected="values as results",
            got=types.describe(escaped[0]),
            hint="return its contents: ref[...]",
            where=_jax.where_now(),
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
            where=_jax.where_now(),
        )
    for declaration in declarations:
        declaration.check_scope(mesh)
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
            where=_jax.where_now(),
        )
    if axes:
        raise errors.ArgumentError(
            "run_scoped: collective_axes does not name the thread axis",
            expected=repr(mesh.thread_name) if expected else "no axis: one warpgroup",
            got=axes,
            hint="pass the kernel's thread_name, or omit collective_axes",
            where=_jax.where_now(),
        )


def _to_ref(declaration: Any) -> Any:
    types.refuse_foreign(declaration, "scratch")
    to_ref = getattr(declaration, "to_ref", None)
    if to_ref is None:
        raise errors.ArgumentTypeError(
            "not a scratch declaration",
            expected="plgpu.SMEM(shape, dtype), plgpu.Barrier(), or pytrees of them",
            got=repr(declaration),
            hint="declare an array with plgpu.SMEM(shape, dtype)",
            where=_jax.where_now(),
        )
    return to_ref()
