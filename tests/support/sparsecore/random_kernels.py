# SPDX-License-Identifier: Apache-2.0
"""Random correct kernels for SparseCores: steps of copies, sums and barriers.

Each step says what subcores do and what NumPy does. A subcore has two arrays of 8 rows
and its own row numbers; those of a core share one more array.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import sparsecore as plsc
from tests.support.sparsecore.kernels import lanes, part

SUBCORES, ROWS, WIDTH = 4, 8, 128
# Rows of the argument; and of the shared array, which each row number names too.
ALL, SHARED = 32, 16


@dataclasses.dataclass
class Subcore:
    """The references of a subcore, whose number is `s`."""

    s: Any
    x: Any
    a: Any
    b: Any
    rows: Any
    shared: Any
    sem: Any

    @property
    def given(self) -> Any:
        """Its rows of the argument."""
        return self.x.at[plsc.ds(self.s * ROWS, ROWS)]

    def own(self, s: Any) -> Any:
        """The rows of the shared array that are a subcore's."""
        count = SHARED // SUBCORES
        return self.shared.at[plsc.ds(s * count, count)]


@dataclasses.dataclass
class Model:
    """The same arrays of all subcores."""

    x: np.ndarray
    a: np.ndarray
    b: np.ndarray
    rows: np.ndarray
    shared: np.ndarray


def each(function: Callable[[Any], None]) -> None:
    """Calls a function for the index of each register of an array."""

    @plsc.loop(0, ROWS)
    def _(i):
        @plsc.parallel_loop(0, WIDTH, step=lanes())
        def _(j):
            function((i, part(j)))


def load(k: Subcore) -> None:
    plsc.sync_copy(k.given, k.a)


def load_model(m: Model) -> None:
    m.a[...] = m.x.reshape(m.a.shape)


def gather(k: Subcore) -> None:
    plsc.sync_copy(k.x.at[k.rows], k.b)


def gather_model(m: Model) -> None:
    m.b[...] = m.x[m.rows]


def gather_more(k: Subcore) -> None:
    plsc.sync_copy(k.x.at[k.rows], k.a, add=True)


def gather_more_model(m: Model) -> None:
    m.a += m.x[m.rows]


def combine(k: Subcore) -> None:
    def one(at: Any) -> None:
        k.b[at] = k.a[at] - 3 * k.b[at]

    each(one)


def combine_model(m: Model) -> None:
    m.b[...] = m.a - 3 * m.b


def overlap(k: Subcore) -> None:
    copy = plsc.async_copy(k.given, k.b, k.sem)

    def one(at: Any) -> None:
        k.a[at] = k.a[at] ^ 5

    each(one)
    copy.wait()


def overlap_model(m: Model) -> None:
    m.a ^= 5
    m.b[...] = m.x.reshape(m.b.shape)


def scatter(k: Subcore) -> None:
    plsc.subcore_barrier()
    plsc.sync_copy(k.b, k.shared.at[k.rows], add=True)
    plsc.subcore_barrier()


def scatter_model(m: Model) -> None:
    np.add.at(m.shared, m.rows, m.b)


def share(k: Subcore) -> None:
    plsc.subcore_barrier()
    plsc.sync_copy(k.a.at[plsc.ds(0, SHARED // SUBCORES)], k.own(k.s))
    plsc.subcore_barrier()


def share_model(m: Model) -> None:
    count = SHARED // SUBCORES
    m.shared.reshape(SUBCORES, count, WIDTH)[...] = m.a[:, :count]


def neighbour(k: Subcore) -> None:
    destination = k.b.at[plsc.ds(0, SHARED // SUBCORES)]
    plsc.sync_copy(k.own((k.s + 1) % SUBCORES), destination)


def neighbour_model(m: Model) -> None:
    count = SHARED // SUBCORES
    own = m.shared.reshape(SUBCORES, count, WIDTH)
    m.b[:, :count] = np.roll(own, -1, axis=0)


def fetch(k: Subcore) -> None:
    plsc.sync_copy(k.shared.at[k.rows], k.a)


def fetch_model(m: Model) -> None:
    m.a[...] = m.shared[m.rows]


def scan(k: Subcore) -> None:
    def one(at: Any) -> None:
        k.b[at] = plsc.cumsum(k.b[at])

    each(one)


def scan_model(m: Model) -> None:
    registers = m.b.reshape(SUBCORES, ROWS, -1, lanes())
    m.b[...] = np.cumsum(registers, axis=-1, dtype=np.int32).reshape(m.b.shape)


STEPS: list[tuple[Callable[[Subcore], None], Callable[[Model], None]]] = [
    (load, load_model), (gather, gather_model), (gather_more, gather_more_model),
    (combine, combine_model), (overlap, overlap_model), (scatter, scatter_model),
    (share, share_model), (neighbour, neighbour_model), (fetch, fetch_model),
    (scan, scan_model),
]  # fmt: skip


@dataclasses.dataclass
class Program:
    """A kernel.

    Attributes:
      steps: its steps.
      args: its arguments.
      expected: its result.
      scratch: its scratch_types.
    """

    steps: list[str]
    body: Callable[..., None]
    args: list[np.ndarray]
    expected: np.ndarray
    scratch: list[Any]


def program(seed: int, length: int = 6) -> Program:
    """Returns a kernel of random steps."""
    choices, numbers = random.Random(seed), np.random.default_rng(seed)
    steps = [choices.choice(STEPS) for _ in range(length)]
    x = numbers.integers(-9, 9, (ALL, WIDTH), np.int32)
    rows = numbers.integers(0, SHARED, (SUBCORES, ROWS), np.int32)
    both = x.reshape(SUBCORES, ROWS, WIDTH)
    m = Model(x, both.copy(), both.copy(), rows, np.zeros((SHARED, WIDTH), np.int32))
    share_model(m)
    for _, model in steps:
        model(m)

    def body(x, r, o, *scratch):
        k = Subcore(lax.axis_index("s"), x, *scratch)
        plsc.sync_copy(r.at[k.s], k.rows)
        plsc.sync_copy(k.given, k.a)
        plsc.sync_copy(k.given, k.b)
        share(k)
        for emit, _ in steps:
            emit(k)
        plsc.sync_copy(k.a, o.at[0, plsc.ds(k.s * ROWS, ROWS)])
        plsc.sync_copy(k.b, o.at[1, plsc.ds(k.s * ROWS, ROWS)])

    shape = (ROWS, WIDTH)
    scratch = [
        plsc.VMEM(shape, jnp.int32), plsc.VMEM(shape, jnp.int32),
        plsc.VMEM((ROWS,), jnp.int32), plsc.VMEM_SHARED((SHARED, WIDTH), jnp.int32),
        plsc.SemaphoreType.DMA,
    ]  # fmt: skip
    expected = np.stack([m.a, m.b]).reshape(2, ALL, WIDTH)
    names = [emit.__name__ for emit, _ in steps]
    return Program(names, body, [x, rows], expected, scratch)
