# SPDX-License-Identifier: Apache-2.0
"""A row of the table, and the ways in which its program calls a kernel."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu

X = np.arange(128, dtype=np.float32)
XS = np.stack([X, X + 1, X + 2])
VECTOR = jax.ShapeDtypeStruct(X.shape, jnp.float32)


def double(x: Any, o: Any) -> None:
    """The body of most programs."""
    o[...] = x[...] * 2


@dataclasses.dataclass(frozen=True)
class Way:
    """One cell's way of calling.

    Attributes:
      entry: `kernel` or `pallas_call`.
      jit: whether the program is jitted as a whole.
    """

    entry: str
    jit: bool

    def make(self, body: Callable[..., None] = double, out: Any = VECTOR) -> Any:
        """Returns a function of arrays that runs the body."""
        make: Any = getattr(plgpu, self.entry)
        return make(body, out)

    def in_place(self, body: Callable[..., None]) -> Any:
        """Returns a function of a `jax.Ref` that runs the body on it."""
        if self.entry == "kernel":
            return plgpu.kernel(body, ())
        spec = plgpu.BlockSpec(memory_space=plgpu.GMEM)
        return plgpu.pallas_call(body, (), in_specs=[spec])

    def run(self, f: Callable[..., Any], *args: Any) -> Any:
        """Calls a function, and waits for its results."""
        return jax.block_until_ready((jax.jit(f) if self.jit else f)(*args))

    def check(self, f: Callable[..., Any], *args: Any, expected: Any) -> None:
        """Calls a function, compares its results, and lowers the jitted `kernel`."""
        jax.tree.map(np.testing.assert_array_equal, self.run(f, *args), expected)
        if self.jit and self.entry == "kernel":
            plgpu.offline.lower(f, *args)

    def __str__(self) -> str:
        return f"{'jit' if self.jit else 'eager'} {self.entry}"


CELLS = tuple(
    Way(entry, jit)
    for jit, entry in itertools.product((False, True), ("kernel", "pallas_call"))
)


@dataclasses.dataclass(frozen=True)
class Refused:
    """What a cell raises instead.

    Attributes:
      error: the class.
      text: a part of what it says.
      reason: why, for the table.
    """

    error: type[BaseException]
    text: str
    reason: str


SHARDED = Refused(
    jax.errors.JaxRuntimeError,
    "is sharded over devices",
    "XLA would gather the operand on each device; call the kernel in a `shard_map`",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
      name: what is composed, in Markdown.
      program: runs one cell; raises if a result is wrong.
      refused: refused cells, by `str(way)`, "eager", "jit", "kernel", "pallas_call", or
        "all".
      devices: how many devices it needs. Two are those of another process.
      offline: needs the CUDA wheels.
      note: what the program shows, where the name does not say it.
    """

    name: str
    program: Callable[[Way], None]
    refused: Mapping[str, Refused] = dataclasses.field(default_factory=dict)
    devices: int = 1
    offline: bool = False
    note: str = ""

    def outcome(self, way: Way) -> Refused | None:
        """Returns the refusal of a cell; None for one that passes."""
        keys = (str(way), "jit" if way.jit else "eager", way.entry, "all")
        return next((self.refused[key] for key in keys if key in self.refused), None)


def run_cell(row: Row, way: Way) -> None:
    """Runs a cell; raises AssertionError if its outcome is another one."""
    refused = row.outcome(way)
    if refused is None:
        row.program(way)
        return
    try:
        row.program(way)
    except refused.error as error:
        assert refused.text in str(error), str(error)
        return
    raise AssertionError(f"{row.name}, {way}: not refused")
