# SPDX-License-Identifier: Apache-2.0
"""Two accesses to one array in TMEM, ordered as the PTX ISA asks, or with a mistake."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.emulator.gpu.tensor_cores.order import ORDER, Operation, Order
from tests.support import everywhere
from tests.support.mutations.mutant import Switches
from tests.support.tensor_products import F32, storage

# The array is as wide as an operand is deep, so that it can be either.
M, N = 128, 16
START, STORED, COPIED = 3.0, 5.0, 7.0
BY_COMMIT = {Operation.PRODUCT, Operation.OPERAND, Operation.COPY}
PIPELINED = {Order.IN_ORDER, Order.SAME_TILE}
IN_WARP = {Order.IN_WARP_OR_LOAD, Order.IN_WARP_OR_STORE}


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two accesses.

    Attributes:
      first, second: what they are.
      crosses: whether another warpgroup makes the second one.
    """

    first: Operation
    second: Operation
    crosses: bool

    @property
    def order(self) -> Order:
        """What the table says of it."""
        return ORDER[self.first, self.second]

    @property
    def needs_nothing(self) -> bool:
        """Whether it needs no wait and no barrier."""
        return not self.crosses and self.order in PIPELINED | IN_WARP

    @property
    def completes(self) -> bool:
        """Whether the first access has to be complete."""
        return self.order not in PIPELINED and not self.needs_nothing

    @property
    def mistakes(self) -> list[str]:
        """Those that make it a race."""
        found = []
        if self.order is Order.SAME_TILE:
            found.append("another tile")
        if self.completes:
            found.append("no completion")
        if self.crosses:
            found.append("no fence")
        return found


PAIRS = [
    Pair(first, second, crosses)
    for (first, second), order in ORDER.items()
    if order is not Order.READS
    for crosses in (False, True)
]


class Access:
    """Makes accesses, and says what they leave."""

    def __init__(self, place: Any, other: Any, held: Any, left: Any, right: Any):
        self.place, self.other, self.held = place, other, held
        self.left, self.right = left, right

    def __call__(self, operation: Operation, part: Any = None) -> Any:
        """Makes one; returns what it loads."""
        place, right = self.place, self.right
        if part is not None:
            place, right = place.at[:, part], right.at[part]
        match operation:
            case Operation.PRODUCT:
                plgpu.tcgen05_mma(place, self.left, right.T, accumulate=False)
            case Operation.OPERAND:
                plgpu.tcgen05_mma(self.other, place, right.T, accumulate=False)
            case Operation.COPY:
                plgpu.async_copy_smem_to_tmem(self.held, place)
            case Operation.LOAD:
                return plgpu.async_load_tmem(place)
            case Operation.STORE:
                plgpu.async_store_tmem(place, jnp.full((M, N), STORED, F32))
        return None


def model(pair: Pair) -> list[np.ndarray]:
    """What the array holds in the end, and what a load or a product has read."""
    place, read = START, 0.0
    for operation in (pair.first, pair.second):
        match operation:
            case Operation.PRODUCT:
                place = N * 1.0
            case Operation.OPERAND:
                read = N * place
            case Operation.COPY:
                place = COPIED
            case Operation.LOAD:
                read = place
            case Operation.STORE:
                place = STORED
    return [np.full((M, N), value, np.float32) for value in (place, read)]


def complete(operation: Operation, done: Any) -> None:
    """Completes accesses of a kind for the warpgroup that has made them."""
    if operation in BY_COMMIT:
        plgpu.tcgen05_commit_arrive(done)
        plgpu.barrier_wait(done)
    elif operation is Operation.LOAD:
        plgpu.wait_load_tmem()
    else:
        plgpu.commit_tmem()


def make(pair: Pair, m: Switches) -> Callable[[Any], Callable[..., Any]]:
    """The kernel; `m` switches mistakes on."""
    skips = m("no completion")
    orders = not m("no fence")
    part = plgpu.ds(0, 8) if m("another tile") else None

    def hand_over(done, handed):
        """What the first warpgroup does in between."""
        if pair.completes and not skips:
            complete(pair.first, done)
        if pair.crosses:
            plgpu.barrier_arrive(handed)

    def body(
        out, read, place, other, held, left, right, start, handed, done, ended, last
    ):
        access = Access(place, other, held, left, right)
        wg, second = lax.axis_index("wg"), int(pair.crosses)

        @plgpu.when(wg == 0)
        def _():
            held[...] = jnp.full((M, N), COPIED, F32)
            left[...] = jnp.full((M, N), 1, F32)
            right[...] = jnp.full((N, N), 1, F32)
            plgpu.commit_smem()
            place[...] = jnp.full((M, N), START, F32)
            plgpu.barrier_arrive(start)

        plgpu.barrier_wait(start)

        @plgpu.when(wg == 0)
        def _():
            loaded = access(pair.first)  # at: first
            hand_over(done, handed)
            if loaded is not None:
                read[...] = loaded
            plgpu.tcgen05_commit_arrive(last)

        @plgpu.when(wg == second)
        def _():
            if pair.crosses:
                plgpu.barrier_wait(handed)
            loaded = access(pair.second, part)  # at: second
            complete(pair.second, ended)
            plgpu.barrier_wait(last)
            if pair.needs_nothing and pair.first is Operation.STORE:
                plgpu.commit_tmem()
            if loaded is not None:
                read[...] = loaded
            if Operation.OPERAND in (pair.first, pair.second):
                read[...] = other[...]
            elif Operation.LOAD not in (pair.first, pair.second):
                read[...] = jnp.zeros((M, N), F32)
            out[...] = place[...]

    smem = plgpu.SMEM((M, N), F32, transforms=storage(F32, 64))
    barrier = plgpu.Barrier(orders_tensor_core=True)
    return everywhere.kernel(
        body,
        model(pair),
        plgpu.TMEM((M, N), F32),
        plgpu.TMEM((M, N), F32),
        smem,
        smem,
        plgpu.SMEM((N, N), F32, transforms=storage(F32, 64)),
        barrier,
        plgpu.Barrier(orders_tensor_core=orders),
        *(barrier, barrier, barrier),
        threads={"wg": 2},
        target="sm_100a",
    )
