# SPDX-License-Identifier: Apache-2.0
"""A kernel over the rows of a matrix: blocks of short rows, parts of long ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, expect

# Elements that a block of short rows has, and a part of a long one: 32 a thread.
BLOCK = 4096
# CUDA C++ Programming Guide, "Device Memory Accesses".
_SECTOR_BYTES = 32


class Launch(NamedTuple):
    """The name of a kernel, and its options, see `pallas_call`."""

    name: str
    compiler_params: plgpu.CompilerParams | None
    interpret: Any

    @property
    def backward(self) -> Launch:
        return self._replace(name=f"{self.name}_backward")


@dataclasses.dataclass(frozen=True)
class Rows:
    """An array seen as a matrix: its last axis, and all others together.

    Attributes:
      shape: shape of the array.
    """

    shape: tuple[int, ...]
    # The axis of a block along which the elements of a row are.
    axis: ClassVar[int] = -1

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def grid(self) -> tuple[int, ...]:
        return (self.count // self.together,)

    @property
    def count(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def together(self) -> int:
        return together(self.count, self.columns)

    def whole(self, columns: int) -> tuple[int, ...]:
        return self.count, columns

    def matrix(self, x: jax.Array) -> jax.Array:
        """Returns the array as a matrix; its last axis may have another size."""
        return x.reshape(self.count, x.shape[-1])

    def array(self, matrix: jax.Array) -> jax.Array:
        return matrix.reshape(*self.shape[:-1], matrix.shape[-1])

    def spec(self, columns: int | None = None) -> plgpu.BlockSpec:
        block = self.together, self.columns if columns is None else columns
        return plgpu.BlockSpec(block, lambda i: (i, 0), memory_space=plgpu.GMEM)

    def call(
        self,
        body: Callable[..., None],
        args: Sequence[jax.Array],
        out: Sequence[tuple[int, Any]],
        launch: Launch,
        shared: Sequence[jax.Array] = (),
    ) -> list[jax.Array]:
        """Calls `body(*args, *shared, *out)` for each block of rows.

        Args:
          body: takes references to a block of rows of each argument and result, and
            to the whole of what is shared.
          args: arrays with as many rows.
          out: columns and type of each result.
          shared: arrays that all rows need.
        """
        whole = plgpu.BlockSpec(memory_space=plgpu.GMEM)
        results = plgpu.pallas_call(
            body,
            out_shape=tuple(
                jax.ShapeDtypeStruct(self.whole(columns), dtype)
                for columns, dtype in out
            ),
            grid=self.grid,
            in_specs=[*(self.spec(x.shape[-1]) for x in args), *[whole] * len(shared)],
            out_specs=tuple(self.spec(columns) for columns, _ in out),
            **launch._asdict(),
        )(*map(self.matrix, args), *shared)
        return [self.array(y) for y in results]

    def over_parts(self, step: Callable[[Any, int, Any], Any], carry: Any) -> Any:
        """Folds `step(first column, columns, carry)` over the parts of a row."""
        whole, rest = divmod(self.columns, BLOCK)
        carry = lax.fori_loop(
            0, whole, lambda i, carry: step(i * BLOCK, BLOCK, carry), carry
        )
        return step(whole * BLOCK, rest, carry) if rest else carry


@dataclasses.dataclass(frozen=True)
class Columns(Rows):
    """Rows along the second of three axes: a block has several of them, as columns."""

    axis: ClassVar[int] = 0
    # Elements of a block: its derivative has two of them in registers.
    most: ClassVar[int] = 8192

    @property
    def columns(self) -> int:
        return self.shape[1]

    @property
    def together(self) -> int:
        return together(self.shape[2], self.columns, self.most)

    @property
    def grid(self) -> tuple[int, ...]:
        return self.shape[0], self.shape[2] // self.together

    def fits(self, itemsize_bytes: int) -> bool:
        """Whether a block fits, and consists of whole sectors of GMEM."""
        wide = self.together * itemsize_bytes >= _SECTOR_BYTES
        return wide and self.columns * self.together <= self.most

    def whole(self, columns: int) -> tuple[int, ...]:
        del columns
        return self.shape

    def matrix(self, x: jax.Array) -> jax.Array:
        return x

    def array(self, matrix: jax.Array) -> jax.Array:
        return matrix

    def spec(self, columns: int | None = None) -> plgpu.BlockSpec:
        del columns
        block = None, self.columns, self.together
        return plgpu.BlockSpec(block, lambda i, j: (i, 0, j), memory_space=plgpu.GMEM)


def together(count: int, elements: int, most_elements: int = BLOCK) -> int:
    """Returns how many items of so many elements form a block.

    It is a power of two that divides their number.
    """
    most = max(1, most_elements // elements)
    return math.gcd(count, 1 << (most.bit_length() - 1))


def params(
    given: plgpu.CompilerParams | None, dtype: Any
) -> plgpu.CompilerParams | None:
    """Returns the parameters; without any, 16-bit types use approximate functions.

    The error of the hardware's exp, log and division is far below their rounding.
    """
    if given is not None:
        return given
    return plgpu.CompilerParams(approx_math=jnp.dtype(dtype).itemsize <= 2)


def check(what: str, **arrays: Any) -> None:
    """Refuses arrays without columns, empty ones, and those of another type."""
    for name, x in arrays.items():
        if len(x.shape) < 1 or 0 in x.shape:
            raise errors.ShapeError(
                f"{what}: {name} has no rows",
                expected="one axis or more, none of them empty",
                got=tuple(x.shape),
                hint="a single row is an array of one axis",
            )
        if x.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
            raise errors.DTypeError(
                f"{what}: {name} has an element type that is not supported",
                expected="float32, float16 or bfloat16",
                got=expect.shown(jnp.dtype(x.dtype)),
                hint=f"convert {name} with astype",
            )
