# SPDX-License-Identifier: Apache-2.0
"""The arguments of `pallas_call` that describe its arrays, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import errors, expect, types
from pallas_gpu.entry import mutable

Spec = types.GridSpec | types.PrefetchScalarGridSpec


def one_spec(grid_spec: Spec | None, given: types.GridSpec, name: str) -> Spec:
    if grid_spec is None:
        return given
    empty = types.GridSpec()
    both = [
        f.name
        for f in dataclasses.fields(given)
        if getattr(given, f.name) is not getattr(empty, f.name)
    ]
    if both:
        raise errors.ArgumentError(
            f"pallas_call {name}: grid_spec contains {both[0]}",
            expected="grid_spec alone, or grid, in_specs, out_specs and scratch_shapes",
            got=f"grid_spec and {', '.join(both)}",
            hint="drop grid_spec, or move the arguments into it",
        )
    return grid_spec


def index_maps(spec: Spec) -> list[Callable[..., Any]]:
    leaves = jax.tree.leaves((spec.in_specs, spec.out_specs))
    maps = (getattr(leaf, "index_map", None) for leaf in leaves)
    return [index_map for index_map in maps if index_map is not None]


def block_specs(specs: Any, like: Any, what: str) -> list[types.BlockSpec]:
    """Returns one block spec for each leaf of `like`."""
    tree = structure(at_top(like))
    if specs is None or specs is types.no_block_spec:
        return [types.no_block_spec] * tree.num_leaves
    try:
        found = tree.flatten_up_to(at_top(specs))
    except ValueError:
        found = [specs]
    if all(x is None or isinstance(x, types.BlockSpec) for x in found):
        return [types.BlockSpec() if x is None else x for x in found]
    given = jax.tree.leaves(specs)
    wrong = [x for x in given if not isinstance(x, types.BlockSpec)]
    if wrong or len(given) != tree.num_leaves:
        raise errors.ArgumentError(
            f"{what} does not match the arrays",
            expected=f"{tree.num_leaves} BlockSpecs, one for each array",
            got=f"{expect.shown(wrong[0])}" if wrong else f"{len(given)} BlockSpecs",
            hint="use plgpu.BlockSpec(block_shape, index_map)",
        )
    raise errors.ArgumentError(
        f"{what} is not a pytree like the arrays",
        expected=str(structure(like)),
        got=str(jax.tree.structure(specs)),
        hint="pass a BlockSpec in the place of each array",
    )


def at_top(tree: Any) -> tuple[Any, ...]:
    """Returns the parts of a tree: at the top a list is a tuple."""
    return tuple(tree) if isinstance(tree, (list, tuple)) else (tree,)


def leaves(arrays: Any) -> list[Any]:
    """Returns the arrays of a pytree; a view of a `jax.Ref` is one."""
    return jax.tree.leaves(arrays, is_leaf=mutable.is_view)


def structure(arrays: Any) -> Any:
    return jax.tree.structure(arrays, is_leaf=mutable.is_view)


def positions(value: Any, what: str) -> dict[int, int]:
    if isinstance(value, Mapping):
        pairs = [(expect.index(i), expect.index(j)) for i, j in value.items()]
        found = {i: j for i, j in pairs if i is not None and j is not None}
        if len(found) == len(value):
            return found
    raise expect.wrong_type(
        what,
        "a dict of integers",
        "a dict of positions of arguments to positions of results",
        value,
        "write {0: 0}",
    )


def aliases(
    given: Mapping[int, int], args: Any, out_shape: Any, prefetched: int, name: str
) -> list[tuple[int, int]]:
    who = f"pallas_call {name}: input_output_aliases"
    ins, outs = leaves(args), jax.tree.leaves(out_shape)
    pairs = list(given.items())
    for i, j in pairs:
        problem = None
        if not prefetched <= i < len(ins):
            problem = f"arguments {prefetched} to {len(ins) - 1}", f"argument {i}"
        elif mutable.is_mutable(ins[i]):
            problem = "an array: kernels update a jax.Ref in place", f"argument {i}"
        elif not 0 <= j < len(outs):
            problem = f"results 0 to {len(outs) - 1}", f"result {j}"
        elif [b for _, b in pairs].count(j) > 1:
            problem = "one argument for a result", f"several for result {j}"
        elif (a := _type(ins[i])) != (b := _type(outs[j])):
            problem = f"{b[1]}{list(b[0])}, as result {j}", f"{a[1]}{list(a[0])}"
        if problem is not None:
            raise errors.ArgumentError(
                f"{who} does not match the arrays",
                expected=problem[0],
                got=problem[1],
                hint="write {i: j} where argument i has the shape and dtype of result "
                "j, both counted over the leaves of pytrees",
            )
    return pairs


def in_place(spec: Spec, pairs: Sequence[tuple[int, int]]) -> Spec:
    """Returns the specs, with arguments and results that are one whole array in GMEM.

    A copy of the argument in SMEM and one of the result would not be one array.

    Args:
      spec: of a single CTA, with a block spec for each array.
      pairs: (argument, result), arguments that index maps read included.
    """
    ins, outs = list(spec.in_specs), list(spec.out_specs)
    n = spec.num_scalar_prefetch
    for i, j in pairs:
        if ins[i - n] == outs[j] == types.no_block_spec:
            ins[i - n] = outs[j] = types.BlockSpec(memory_space=types.GMEM)
    return dataclasses.replace(spec, in_specs=ins, out_specs=outs)


def _type(x: Any) -> tuple[tuple[int, ...], Any]:
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    return tuple(x.shape), jnp.dtype(x.dtype)


def check_prefetched(args: Sequence[Any], count: int, name: str) -> None:
    if count > len(args):
        raise errors.ArgumentError(
            f"pallas_call {name}: num_scalar_prefetch exceeds the arguments",
            expected=f"{count} or more arguments",
            got=len(args),
            hint="it counts the first arguments, which index maps read",
        )
    for i, x in enumerate(args[:count]):
        dtype = getattr(x, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
            raise errors.ArgumentTypeError(
                f"pallas_call {name}: argument {i} is not an array of integers",
                expected="an array of integers: num_scalar_prefetch counts the first "
                "arguments, which index maps read",
                got=expect.shown(x),
                hint="convert it with jnp.asarray(..., jnp.int32), or reduce "
                "num_scalar_prefetch",
            )
