# SPDX-License-Identifier: Apache-2.0
"""Block specs of JAX's Pallas as those of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pallas_gpu import errors, types
from pallas_gpu.bridge.evaluate import Evaluator
from pallas_gpu.bridge.origin import is_default, located


def block_spec(mapping: Any) -> types.BlockSpec:
    """Returns the block spec of an argument or a result.

    Args:
      mapping: JAX's description: block shape, index map as a jaxpr, memory space.

    Raises:
      UnsupportedError: a block that this package does not have.
      MemorySpaceError: a memory in which blocks cannot be.
    """
    if mapping.pipeline_mode is not None:
        raise errors.UnsupportedError(
            f"BlockSpec of {mapping.origin}: a pipeline_mode of one block",
            expected="one number of buffers for all blocks",
            got=str(mapping.pipeline_mode),
            hint="drop pipeline_mode and set CompilerParams(max_concurrent_steps=...)",
        )
    if mapping.transforms:
        raise errors.UnsupportedError(
            f"BlockSpec of {mapping.origin}: transforms of JAX's Mosaic GPU",
            expected="pl.BlockSpec(block_shape, index_map)",
            got=", ".join(map(str, mapping.transforms)),
            hint="leave them out: tiling and swizzle of blocks are inferred",
        )
    space = _space(mapping)
    if _is_left_out(mapping):
        return types.no_block_spec
    shape = tuple(_entry(entry, mapping) for entry in mapping.block_shape)
    return types.BlockSpec(shape, _index_map(mapping), memory_space=space)


def _is_left_out(mapping: Any) -> bool:
    """Whether the author gave the array neither blocks nor a memory."""
    given = mapping.ref_aval.memory_space
    whole = tuple(mapping.array_aval.shape)
    sizes = tuple(getattr(x, "block_size", x) for x in mapping.block_shape)
    return (
        getattr(given, "name", given) in (None, "DEFAULT")
        and sizes == whole
        and is_default(mapping.index_map_jaxpr.jaxpr)
    )


def _space(mapping: Any) -> types.MemorySpace | None:
    if getattr(mapping.ref_aval.memory_space, "name", "") == "DEFAULT":
        return None
    space = types.base_aval(mapping.ref_aval).memory_space
    if space in (types.SMEM, types.GMEM):
        return space
    raise errors.MemorySpaceError(
        f"BlockSpec of {mapping.origin}: blocks cannot be in this memory",
        expected="no memory_space, pl.ANY or one of this package",
        got=f"memory_space {mapping.ref_aval.memory_space}",
        hint="leave memory_space out for blocks in SMEM",
    )


def _entry(entry: Any, mapping: Any) -> Any:
    """Returns a dimension of a block shape."""
    kind = type(entry).__name__
    if entry is None or kind == "Squeezed":
        return None
    if isinstance(entry, int):
        return entry
    if kind == "Blocked":
        return entry.block_size
    if kind == "Element":
        return types.Element(entry.block_size, tuple(entry.padding))
    if kind == "BoundedSlice":
        return types.BoundedSlice(entry.block_size)
    raise errors.UnsupportedError(
        f"BlockSpec of {mapping.origin}: unknown kind of block dimension",
        expected="an integer, pl.Squeezed, pl.Blocked, pl.Element or pl.BoundedSlice",
        got=str(entry),
        hint="use pl.Element, whose index map counts elements",
    )


def _index_map(mapping: Any) -> Callable[..., Any]:
    """Returns the index map as a function, of grid indices and prefetched arrays."""
    jaxpr = mapping.index_map_jaxpr
    evaluator = Evaluator(axes=())

    def index_map(*arguments: Any) -> tuple[Any, ...]:
        index = evaluator.run(jaxpr, arguments)
        return tuple(jax.tree.unflatten(mapping.index_map_out_tree, index))

    return located(index_map, jaxpr)
