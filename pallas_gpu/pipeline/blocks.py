# SPDX-License-Identifier: Apache-2.0
"""Blocks: the part of an array that a grid step accesses, and its buffers in SMEM."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_gpu import _jax, arch, errors, types
from pallas_gpu.entry import scope
from pallas_gpu.layouts.smem.window import ALLOCATION_ALIGNMENT_BYTES
from pallas_gpu.pipeline.index_maps import Indexed
from pallas_gpu.primitives import _engines, mbarrier, registers, tma


@dataclasses.dataclass(frozen=True, eq=False)
class Stream(Indexed):
    """An array that a loop over a grid accesses block by block.

    Attributes:
      direct: whether the body accesses the block in GMEM, without a copy.
      by_elements: whether elements share bytes with others: they are loaded and stored.
    """

    direct: bool = False
    by_elements: bool = False

    @property
    def buffered(self) -> bool:
        return self.spec.memory_space is not types.GMEM and not self.direct

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of the body's reference."""
        squeezed = self.spec.squeezed(len(self.sizes))
        kept = zip(self.sizes, squeezed, strict=True)
        return tuple(size for size, gone in kept if not gone)

    # --- which block ------------------------------------------------------------------

    def window(self, indices: Sequence[Any]) -> types.RefView:
        """Returns the part of the array at a position of the loop."""
        shape = tuple(self.ref.shape)
        starts = self.starts(indices)
        steps = [
            start if gone else _jax.Slice(start, size, 1)
            for start, size, gone in zip(
                starts, self.sizes, self.spec.squeezed(len(shape)), strict=True
            )
        ]
        base = types.as_view(self.ref)
        step = _jax.indexer(steps, (), shape)
        return types.RefView(base.ref, (*base.transforms, step))

    def starts(self, indices: Sequence[Any]) -> list[Any]:
        entries = self.spec.block_shape or (None,) * len(self.sizes)
        return [
            _start(i, size, entry)
            for i, size, entry in zip(
                self.block_index(indices), self.sizes, entries, strict=True
            )
        ]

    def at_index_map(self, copy: Callable[[], None]) -> None:
        """Copies a block; messages about it name the line of the index map."""
        if self.spec.index_map is None:
            copy()
        else:
            scope.called_from(self.spec.index_map, copy)

    def require_block_indices(self, axis: int, size: int) -> None:
        """Refuses an index in elements, whose last block is outside of the array."""
        shape, index_map = self.spec.block_shape, self.spec.index_map
        if shape is None or index_map is None or self.spec.oob_fill_mode is not None:
            return
        sizes = zip(shape, self.ref.shape, strict=True)
        steps = self.steps_along(axis)
        for d, (step, (entry, extent)) in enumerate(zip(steps, sizes, strict=True)):
            block = getattr(entry, "block_size", entry)
            in_blocks = isinstance(entry, (int, types.Blocked)) and block > 1
            # Wherever the first block is, the last is so many elements after it.
            if in_blocks and step == block and step * block * (size - 1) >= extent:
                raise errors.OutOfBoundsError(
                    f"BlockSpec of {self.what}: the index map returns indices of "
                    "elements",
                    expected=f"the index of a block: block i begins at element "
                    f"{block} * i",
                    got=f"an index of dimension {d} that grows by {step} along axis "
                    f"{axis}, and blocks beyond its {extent} elements",
                    hint=f"return i in place of i * {block}, or use "
                    f"plgpu.Element({block}) for an index in elements",
                    where=scope.location(index_map),
                )

    # --- its buffers ------------------------------------------------------------------

    def require_smem(self) -> None:
        """Refuses a whole array that no target's SMEM can hold."""
        target = arch.target(arch.DEFAULT_TARGET)
        limit = types.SMEM.budget(target)
        elements = math.prod(self.ref.shape)
        used = elements * types.itemsize_bits(self.ref.dtype) // 8
        if not self.buffered or self.spec.block_shape is not None or used <= limit:
            return
        raise errors.OutOfResources(
            f"{self.what}: a whole array, without a block shape, exceeds SMEM",
            resource="SMEM",
            limit_bytes=limit,
            used_bytes=used,
            expected=f"a block of at most {limit:,} bytes",
            got=f"{types.describe(self.ref)}, {used:,} bytes",
            hint="pass plgpu.BlockSpec(block_shape, index_map), a block for each step, "
            "or plgpu.BlockSpec(memory_space=plgpu.GMEM): the body then reads the "
            "parts that it needs",
        )

    def buffers(self, slots: int) -> types.ScratchType:
        storage = types.Storage(tuple(self.spec.transforms))
        dtype = jnp.dtype(self.ref.dtype)
        shape = (slots, *self.block_shape)
        return types.ScratchType(types.SMEM, shape, dtype, storage)

    def where_it_fits(self, indices: Sequence[Any]) -> Stream:
        """Returns the stream, `direct` if the body can access its blocks in GMEM.

        It can where TMA cannot copy them and the body needs no buffer. If it does,
        `copy_gmem_to_smem` and `copy_smem_to_gmem` copy them by threads, in bytes.
        """
        if not self.buffered:
            return self
        if 0 in self.block_shape:
            return dataclasses.replace(self, direct=True)
        by_tma, by_threads = self._carriers(indices)
        # Threads copy to those of several buffers that TMA cannot address.
        if by_tma and (by_threads or self._is_aligned):
            return self
        # The body may access elements outside of the array, or relies on transforms.
        needs_buffer = bool(self.spec.transforms) or self._may_exceed
        if not needs_buffer:
            return dataclasses.replace(self, direct=True)
        has_nan = self.spec.oob_fill_mode is types.OOBFillMode.NAN
        return dataclasses.replace(self, by_elements=not (by_threads or has_nan))

    def load_elements(self, indices: Sequence[Any], buffer: Any, full: Any) -> None:
        """Copies a block; elements outside of the array are 0."""
        inside = self._inside(indices)
        buffer[...] = registers.load(self.window(indices), mask=inside)
        tma.commit_smem()
        mbarrier.barrier_arrive(full)

    def store_elements(self, buffer: Any, indices: Sequence[Any]) -> None:
        view, inside = self.window(indices), self._inside(indices)
        registers.store(view, (), buffer[...], mask=inside)

    def _inside(self, indices: Sequence[Any]) -> Any:
        shape, squeezed = self.block_shape, self.spec.squeezed(len(self.sizes))
        inside = jnp.ones(shape, bool)
        starts = zip(self.starts(indices), self.ref.shape, squeezed, strict=True)
        kept = [(start, n) for start, n, gone in starts if not gone]
        for axis, (start, n) in enumerate(kept):
            places = lax.broadcasted_iota(jnp.int32, shape, axis) + jnp.int32(start)
            inside = inside & (places >= 0) & (places < n)
        return inside

    def in_gmem(self) -> Stream:
        """Returns the stream; the body accesses its blocks where they are."""
        whole = self.block_shape == tuple(self.ref.shape)
        if self.spec.block_shape is None or whole:
            return self
        if self._is_padded:
            raise errors.UnsupportedError(
                f"BlockSpec of {self.what}: a block in GMEM is padded",
                expected="integers: where a block exceeds the array, the body masks",
                got=f"block_shape {self.spec.block_shape}",
                hint="leave memory_space out, or pass plgpu.BlockSpec(memory_space="
                "plgpu.GMEM) and take the part in the body",
            )
        return dataclasses.replace(self, direct=True)

    @property
    def _is_padded(self) -> bool:
        return any(
            isinstance(entry, types.BoundedSlice) or any(getattr(entry, "padding", ()))
            for entry in self.spec.block_shape or ()
        )

    @property
    def _is_aligned(self) -> bool:
        """Whether TMA can address each of several buffers in a row."""
        bits = math.prod(self.block_shape) * types.itemsize_bits(self.ref.dtype)
        return bits % (8 * ALLOCATION_ALIGNMENT_BYTES) == 0

    @property
    def _may_exceed(self) -> bool:
        """Whether a block with a valid index may lie partly outside of the array."""
        divides = zip(self.ref.shape, self.sizes, strict=True)
        return self._is_padded or any(n % size for n, size in divides)

    def _carriers(self, indices: Sequence[Any]) -> tuple[bool, bool]:
        """Whether TMA, and whether threads can copy a block, of whole bytes."""
        found: list[bool] = []

        def copies(buffer: Any) -> None:
            view = self.window(indices)
            sides = _engines.Side.of(view), _engines.Side.of(buffer.at[0])
            # A store is stricter than a load.
            by_threads = _engines.for_threads(*sides, store=True)
            try:
                # Adjacent bytes without a tensor map may start anywhere at run time.
                _engines.check_copy(*sides, allow_line=False)
                found.extend((True, by_threads))
            except errors.LayoutError:
                found.extend((False, by_threads))

        # In a trace of its own: an index map may read an array.
        _jax.trace(copies, [self.buffers(1).to_ref()])
        return found[0], found[1]


def checked(stream: Stream, *, output: bool, multicast: bool = True) -> Stream:
    """Returns the stream if its spec has an effect."""
    spec = stream.spec
    if spec.memory_space not in (None, types.SMEM, types.GMEM):
        raise errors.MemorySpaceError(
            f"BlockSpec of {stream.what}: blocks must be in SMEM or GMEM",
            expected="memory_space SMEM (default) or GMEM",
            got=f"memory_space {spec.memory_space.name}",
            hint="omit memory_space",
        )
    reason = _without_effect(stream, output, multicast)
    if reason is not None:
        raise errors.UnsupportedError(
            f"BlockSpec of {stream.what}: {reason[0]}",
            expected=f"a BlockSpec without {reason[1]}",
            got=f"{reason[1]}={getattr(spec, reason[1])!r}",
            hint="leave it out, or use emit_pipeline_warp_specialized"
            if not multicast and not output
            else "leave it out",
        )
    return stream.in_gmem() if spec.memory_space is types.GMEM else stream


def _without_effect(
    stream: Stream, output: bool, multicast: bool
) -> tuple[str, str] | None:
    """Returns a field of a spec that would have no effect, behind the reason."""
    spec, entries = stream.spec, stream.spec.block_shape or ()
    if spec.collective_axes and (output or not multicast):
        return "blocks are not multicast", "collective_axes"
    if spec.collective_axes and not stream.axes:
        return "a block that no axis changes is not multicast", "collective_axes"
    if output and spec.delay_release:
        return "the buffers of outputs are not read asynchronously", "delay_release"
    if output and spec.oob_fill_mode is not None:
        return "what lies outside of a result is not stored", "oob_fill_mode"
    if output and any(isinstance(x, types.BoundedSlice) for x in entries):
        return "TMA stores whole blocks, not a BoundedSlice of them", "block_shape"
    if output and any(isinstance(x, types.Element) and x.padding[0] for x in entries):
        return "TMA stores no block that starts before the array", "block_shape"
    for field in ("transforms", "delay_release", "oob_fill_mode", "collective_axes"):
        if spec.memory_space is types.GMEM and getattr(spec, field):
            return "an array in GMEM is not copied", field
    return None


def _start(index: Any, size: int, entry: Any) -> Any:
    if isinstance(entry, types.Element):
        return index - entry.padding[0] if entry.padding[0] else index
    return index if isinstance(entry, types.BoundedSlice) else index * size
