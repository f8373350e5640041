# SPDX-License-Identifier: Apache-2.0
"""The arguments of `pallas_call` that describe its arrays, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors, expect, types
from pallas_gpu.entry import scope
from pallas_gpu.pipeline.streams import is_spec

Spec = types.GridSpec | types.PrefetchScalarGridSpec


def one_spec(grid_spec: Spec | None, given: types.GridSpec, name: str) -> Spec:
    """Returns the grid and the specs, which are given together or one by one."""
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
            where=_jax.where_now(),
        )
    return grid_spec


def index_maps(spec: Spec) -> list[Callable[..., Any]]:
    """Returns the author's functions in the specs."""
    leaves = jax.tree.leaves((spec.in_specs, spec.out_specs), is_leaf=is_spec)
    maps = (getattr(leaf, "index_map", None) for leaf in leaves)
    return [index_map for index_map in maps if index_map is not None]


def block_specs(specs: Any, like: Any, what: str) -> list[types.BlockSpec]:
    """Returns one block spec for each leaf of `like`."""
    structure = jax.tree.structure(like)
    if specs is None:
        return [types.BlockSpec()] * structure.num_leaves
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    wrong = [x for x in leaves if not is_spec(x)]
    if wrong or len(leaves) != structure.num_leaves:
        raise errors.ArgumentError(
            f"{what} does not match the arrays",
            expected=f"{structure.num_leaves} BlockSpecs, one for each array",
            got=f"{expect.shown(wrong[0])}" if wrong else f"{len(leaves)} BlockSpecs",
            hint="use plgpu.BlockSpec(block_shape, index_map)",
            where=scope.called_at(),
        )
    return [types.BlockSpec() if x is None else x for x in leaves]


def check_prefetched(args: Sequence[Any], count: int, name: str) -> None:
    """Checks the arguments that index maps read.

    Raises:
      ArgumentError: there are fewer.
      ArgumentTypeError: one is not an array of integers.
    """
    if count > len(args):
        raise errors.ArgumentError(
            f"pallas_call {name}: num_scalar_prefetch exceeds the arguments",
            expected=f"{count} or more arguments",
            got=len(args),
            hint="it counts the first arguments, which index maps read",
            where=scope.called_at(),
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
                where=scope.called_at(),
            )
