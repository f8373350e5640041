# SPDX-License-Identifier: Apache-2.0
"""The kernel of all collectives: read parts of arrays, combine, store them at devices.

An array is a number of rows of parts of equal length, (rows, parts, length); a result
has the same form. CTAs divide the tiles of the parts among them. For each tile a device
reads from some devices, combines what it has read, and stores it at some devices:

    gather      reads its own array       stores at all devices
    shift       reads its own array       stores at one other device
    exchange    reads its own parts       stores each at its device
    scatter     reads its part at all     stores at itself
    reduce      reads all at all          stores at itself, in one step
    allreduce   reads its part at all     stores at all devices

Tiles pass through registers, in vectors of 16 bytes. The launch begins on all devices
before any of them reads or stores elsewhere; at the end they meet.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.collectives.devices import DeviceCall, Group, launch
from pallas_gpu.ops.folded import split
from pallas_gpu.ops.rules import cached

THREADS = 128
# One per SM, and two for large arrays: of 256 MiB on four H100 all_reduce takes 0.88 of
# the time, and others the same to 2 %.
_MOST_CTAS = 132
_VECTOR_BYTES = 16
# Vectors that a thread has under way; eight of each of two devices are 64 registers.
_UNROLLED = 8

# Bytes of a part up to which its elements travel with flags.
_FLAGGED_BYTES = 64 * 1024

Kind = Literal["gather", "shift", "exchange", "scatter", "reduce", "allreduce"]
REDUCTIONS: dict[str, Any] = {
    "add": lax.add,
    "min": lax.min,
    "max": lax.max,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(DeviceCall):
    """A call of a collective of one array.

    Attributes:
      dimension: of the operand, that is gathered or scattered.
      reduction: how elements are combined.
      distance: of the device that a rotation stores at.
      blocks: CTAs of the kernel, at most.
    """

    dimension: int = 0
    reduction: str = "add"
    distance: int = 1
    blocks: int | None = None

    def takes_kernel(self, dtype: Any) -> bool:
        """Returns whether a kernel does it."""
        return (self.method is not None or _moves(dtype)) and self.reaches()

    def run(self, kind: Kind, x: jax.Array) -> jax.Array:
        """Runs the kernel on an array of (rows, parts, length), of any length.

        Lengths that are not multiples of a tile are filled up, by a copy.
        """
        rows, _, length = x.shape

        def filled_up(least: int) -> Exchange:
            whole = plgpu.align_to(length, least)
            return Exchange(self, self.group, kind, rows, whole, jnp.dtype(x.dtype))

        e = filled_up(2 * THREADS)
        if not e.is_flagged:
            e = filled_up(quantum(x.dtype))
        if e.length == length:
            return make_kernel(e)(x)
        padded = jnp.pad(x, ((0, 0), (0, 0), (0, e.length - length)))
        return make_kernel(e)(padded)[..., :length]


def _moves(dtype: Any) -> bool:
    """Returns whether elements fill vectors of bytes: no bool, complex, 4-bit types."""
    for kind, info in (jnp.floating, jnp.finfo), (jnp.integer, jnp.iinfo):
        if jnp.issubdtype(dtype, kind):
            return jnp.dtype(dtype).itemsize * 8 == info(dtype).bits
    return False


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The kernel of a collective; hashable, static.

    Attributes:
      call: with the reduction, the distance and the options.
      group: the devices.
      kind: see above.
      rows, length: sizes of the arrays: (rows, parts, length).
      dtype: of the elements.
    """

    call: Call
    group: Group
    kind: Kind
    rows: int
    length: int
    dtype: jnp.dtype

    @property
    def parts_in(self) -> int:
        """Parts of a row of the operand."""
        whole = self.kind in ("gather", "shift", "reduce")
        return 1 if whole else self.group.size

    @property
    def parts_out(self) -> int:
        """Parts of a row of the result."""
        whole = self.kind in ("shift", "scatter", "reduce")
        return 1 if whole else self.group.size

    @property
    def sources(self) -> int:
        """Devices that each tile is read from."""
        own = self.kind in ("gather", "shift", "exchange")
        return 1 if own else self.group.size

    @property
    def tile(self) -> int:
        """Elements of a tile, which divides `length`."""
        least = quantum(self.dtype)
        count = self.length // least
        most = max(1, _UNROLLED // max(1, self.sources // 2))
        return least * max(i for i in range(1, most + 1) if count % i == 0)

    @property
    def flagged_vector(self) -> int:
        """Elements of a thread with which a CTA has one tile, of those with flags."""
        fits = (
            v
            for v in (2, 4, 8)
            if self.length % (v * THREADS) == 0
            and self.rows * self.length <= v * THREADS * _MOST_CTAS
        )
        return next(fits, 0)

    @property
    def is_flagged(self) -> bool:
        """Returns whether elements travel with flags, and devices do not meet."""
        size = self.rows * self.length * self.dtype.itemsize
        return (
            self.kind not in ("shift", "allreduce")
            and self.call.blocks is None
            and self.dtype.itemsize == 2
            and size <= _FLAGGED_BYTES
            and self.flagged_vector > 0
        )

    @property
    def tiles(self) -> int:
        """Tiles that a device reads."""
        parts = self.group.size if self.kind == "exchange" else 1
        return self.rows * parts * (self.length // self.tile)


def quantum(dtype: Any) -> int:
    """Returns the elements of a tile of one vector a thread."""
    return THREADS * _VECTOR_BYTES // jnp.dtype(dtype).itemsize


@cached
def make_kernel(e: Exchange) -> Any:
    """Returns the kernel: a function of the operand."""
    if e.is_flagged:
        return _flagged_kernel(e)

    def move(me: Any, tile: Any, x: Any, out: Any) -> None:
        _move(e, me, x, out, *_position(e, tile))

    return launch(
        e.group,
        f"collective_{e.kind}",
        move,
        jax.ShapeDtypeStruct((e.rows, e.parts_out, e.length), e.dtype),
        e.tiles,
        e.call.blocks or _MOST_CTAS * (2 if e.tiles > 4 * _MOST_CTAS else 1),
        **e.call.of_kernels,
    )


def _position(e: Exchange, tile: Any) -> tuple[Any, Any, Any]:
    """Returns row, window and distance of the device of a tile."""
    distance: Any = np.int32(0)
    if e.kind == "exchange":
        # Neighbouring CTAs store at different devices, so that no link waits.
        tile, distance = split(tile, e.group.size)
    row, at = split(tile, e.length // e.tile)
    return row, plgpu.ds(at * e.tile, e.tile), distance


def _move(
    e: Exchange, me: Any, x: Any, out: Any, row: Any, window: Any, distance: Any
) -> None:
    """Reads, combines and stores a tile."""
    group = e.group
    layout = plgpu.Layout.WG_STRIDED(
        (e.tile,), vec_size=_VECTOR_BYTES // e.dtype.itemsize
    )
    load = functools.partial(plgpu.load, layout=layout)
    if e.kind == "exchange":
        there = group.at(me, distance)
        group.peer(out, there).at[row, me, window].set(load(x.at[row, there, window]))
        return
    if e.kind == "shift":
        there = group.after(me, e.call.distance)
        group.peer(out, there).at[row, 0, window].set(load(x.at[row, 0, window]))
        return
    if e.kind == "gather":
        value = load(x.at[row, 0, window])
    else:
        part = 0 if e.kind == "reduce" else me
        # In the same order on all devices: their results are equal.
        value = _combine(
            e, [load(group.peer(x, i).at[row, part, window]) for i in range(group.size)]
        )
    if e.parts_out == 1:
        out.at[row, 0, window].set(value)
        return
    # The others first: their stores take longer.
    for i in range(1, group.size + 1):
        group.peer(out, group.after(me, i)).at[row, me, window].set(value)


def _flagged_kernel(e: Exchange) -> Any:
    """Returns a kernel of small arrays, which takes one trip over the links.

    Each element is stored with the number of the call, in one word, in an array that
    is kept. A device waits for the words of all devices: that they have begun
    this call says that they have read those of the call before, and there is room for
    those of two calls.
    """
    group, vector = e.group, e.flagged_vector
    tile = THREADS * vector
    across = e.length // tile
    ctas = e.rows * across
    layout = plgpu.Layout.WG_STRIDED((tile,), vec_size=vector)
    shape = 2, group.size, e.rows, e.length

    def kernel(x: Any, out: Any) -> None:
        kept = functools.partial(plgpu.GMEM, init=0, kept=True)
        inbox = plgpu.get_global(kept(shape, jnp.uint32))
        calls = plgpu.get_global(kept((ctas,), jnp.int32))
        me, cta = group.me(), lax.axis_index("cta")
        row, at = split(cta, across)
        window = plgpu.ds(at * tile, tile)
        call = calls[cta]
        own = inbox.at[call & np.int32(1)]
        flag = ((call + np.int32(1)) << 16).astype(jnp.uint32)

        def load(part: Any) -> Any:
            value = plgpu.load(x.at[row, part, window], layout=layout)
            return lax.bitcast_convert_type(value, jnp.uint16).astype(jnp.uint32)

        def read() -> list[Any]:
            none = plgpu.layout_cast(jnp.zeros((tile,), jnp.uint32), layout)
            places = [own.at[i, row, window] for i in range(group.size)]
            # Atomic: other devices store there meanwhile.
            return [plgpu.atomic_or(place, none, scope="sys") for place in places]

        def is_missing(words: list[Any]) -> Any:
            unlike = (x & np.uint32(0xFFFF0000) != flag for x in words)
            return jnp.any(functools.reduce(lax.bitwise_or, unlike))

        # All loads are under way before the first word is sent, and all reads before
        # the first word is compared.
        others = [group.after(me, i) for i in range(1, group.size + 1)]
        whole = load(np.int32(0)) if e.parts_in == 1 else None
        sent = [load(there) if whole is None else whole for there in others]
        for there, words in zip(others, sent, strict=True):
            target = group.peer(own, there).at[me, row, window]
            plgpu.atomic_xchg(target, words | flag)
        received = lax.while_loop(is_missing, lambda _: read(), read())
        values = [
            lax.bitcast_convert_type(words.astype(jnp.uint16), e.dtype)
            for words in received
        ]
        if e.parts_out == 1:
            values = [_combine(e, values)]
        for i, value in enumerate(values):
            out.at[row, i, window].set(value)
        calls[cta] = call + np.int32(1)

    params = e.call.compiler_params or plgpu.CompilerParams()
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((e.rows, e.parts_out, e.length), e.dtype),
        grid=(ctas,),
        grid_names=("cta",),
        kernel_name=f"small_collective_{e.kind}",
        compiler_params=params.replace(skip_device_barrier=True),
        interpret=e.call.interpret,
    )


def _combine(e: Exchange, values: list[Any]) -> Any:
    """Combines elements, sums of narrow floats in float32."""
    narrow = jnp.issubdtype(e.dtype, jnp.floating) and e.dtype.itemsize < 4
    if narrow and e.call.reduction == "add":
        values = [x.astype(jnp.float32) for x in values]
    return functools.reduce(REDUCTIONS[e.call.reduction], values).astype(e.dtype)
