# SPDX-License-Identifier: Apache-2.0
"""Accumulators of the tensor core: register state that kernels see as references."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors, expect
from pallas_gpu.types import values
from pallas_gpu.types.completion import shows
from pallas_gpu.types.refs import IndexableRef, base_aval, describe
from pallas_gpu.types.spaces.nvidia import REGS
from pallas_gpu.types.spaces.resource import Declaration

# PTX ISA, wgmma.mma_async: M is 64 an instruction, N a multiple of 8 up to 256.
WGMMA_ROWS = 64
WGMMA_COLUMNS = 8


class AccumulatorRef(IndexableRef):
    """A reference to an accumulator in the registers of one warpgroup."""

    __slots__ = ()


@expect.arguments()
@shows("init")
@dataclasses.dataclass(frozen=True)
class ACC(Declaration):
    """Declares an accumulator of wgmma in the registers of a warpgroup.

    Its initial value is zero. PTX: wgmma.mma_async, matrix D. Since: sm_90a.

    Attributes:
      shape: (M, N): M a multiple of 64, N of 8.
      dtype: float32, float16 or int32.

    Raises:
      ShapeError, DTypeError: the tensor core does not support the accumulator.
    """

    shape: Sequence[int]
    dtype: values.ElementType = jnp.float32

    memory_space = REGS

    def __post_init__(self):
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if (
            len(self.shape) != 2
            or self.shape[0] % WGMMA_ROWS
            or self.shape[1] % WGMMA_COLUMNS
            or min(self.shape) < 1
        ):
            raise errors.ShapeError(
                "ACC: the tensor core has no accumulator of this shape",
                expected=f"(M, N) with M a multiple of {WGMMA_ROWS} and N of "
                f"{WGMMA_COLUMNS}",
                got=self.shape,
                hint="pad the tile",
            )
        if self.dtype not in (jnp.float32, jnp.float16, jnp.int32):
            raise errors.DTypeError(
                "ACC: the tensor core does not accumulate in this type",
                expected="float32, float16 or int32",
                got=self.dtype.name,
                hint="accumulate in float32 and convert the result with astype",
            )

    def to_ref(self) -> AccumulatorRef:
        return AccumulatorRef(jax.core.ShapedArray(self.shape, self.dtype), REGS)

    @staticmethod
    @expect.arguments("ACC.init")
    def init(array: Any) -> AccumulatorInit:
        """Returns an accumulator with an initial value, for `run_state`.

        Args:
          array: (M, N) values in registers.

        Raises:
          ArgumentTypeError: it is a reference.
        """
        if isinstance(base_aval(array), _jax.AbstractRef):
            raise errors.ArgumentTypeError(
                "ACC.init: the initial value is a reference",
                expected="an array in registers",
                got=describe(array),
                hint="read it first: ACC.init(ref[...])",
            )
        array = values.array(array, "ACC.init: the initial value")
        return AccumulatorInit(ACC(array.shape, array.dtype), array)


@dataclasses.dataclass(frozen=True)
class AccumulatorInit(Declaration):
    """An accumulator and its initial value; made by `ACC.init`."""

    declaration: ACC
    value: Any

    def to_ref(self) -> Any:
        """Refuses: only run_state accepts an initial value."""
        raise errors.ArgumentError(
            "ACC.init is passed where a declaration is expected",
            expected="plgpu.ACC(shape, dtype) in scratch_types and run_scoped",
            got="plgpu.ACC.init(array)",
            hint="pass it to plgpu.run_state, or store into the accumulator",
        )
