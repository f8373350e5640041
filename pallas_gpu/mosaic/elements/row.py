# SPDX-License-Identifier: Apache-2.0
"""A row of the table of elementwise operations, and what follows from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu import errors
from pallas_gpu.layouts.moves import rates
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.mosaic.elements.arithmetic import Emitter, resize_float


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation for one kind of dtype.

    Attributes:
      emit: takes the dtype, a value for each operand, and the row's parameters.
      cycles: cycles of issue for an element of each thread, as inference weighs the
        work that an array costs which several threads hold; see `layouts/moves/rates`.
    """

    emit: Emitter
    cycles: float = rates.ELEMENT


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation; None for the kinds of dtype that it does not exist for.

    Attributes:
      name: lax's name of the primitive.
      floating, signed, unsigned, boolean, float8: the operation for such operands.
      params: those of the primitive's parameters that the emitters take.
      typed_by: the operand whose dtype selects the case.
      result: the dtype of the result: that of the operands, bool, or any, which the
        emitter gets as `to`.
      widen: f16 and bf16 are computed in f32 and rounded once.
      approx: what f32 uses instead under `approx_math`.
    """

    name: str
    floating: Case | None = None
    signed: Case | None = None
    unsigned: Case | None = None
    boolean: Case | None = None
    float8: Case | None = None
    params: tuple[str, ...] = ()
    typed_by: int = 0
    result: Literal["operand", "bool", "any"] = "operand"
    widen: bool = False
    approx: Case | None = None

    def __post_init__(self):
        given = [case for case in self.cases.values() if case is not None]
        if not given:
            raise errors.InternalError(
                f"The row {self.name!r} of the elementwise table has no emitter"
            )
        if self.approx is not None:
            given.append(self.approx)
            if self.floating is None:
                raise errors.InternalError(
                    f"The row {self.name!r} of the elementwise table has an "
                    "approximation and no emitter for floats"
                )
        for case in given:
            if not callable(case.emit):
                raise errors.InternalError(
                    f"The row {self.name!r} of the elementwise table has no emitter",
                    got=repr(case.emit),
                )

    @property
    def cases(self) -> dict[dtypes.Kind, Case | None]:
        """The cases by kind of dtype."""
        return {
            "float": self.floating,
            "signed": self.signed,
            "unsigned": self.unsigned,
            "bool": self.boolean,
            "float8": self.float8,
        }

    @property
    def kinds(self) -> list[dtypes.Kind]:
        """The kinds of dtype that the operation exists for."""
        return [kind for kind, case in self.cases.items() if case is not None]

    def case(self, dtype: np.dtype, approx_math: bool = False) -> Case:
        """The case of a dtype.

        Raises:
          DTypeError: there is none.
        """
        case = self._find(dtype, approx_math)
        if case is None:
            raise errors.DTypeError(
                f"{self.name} does not take {dtype} operands",
                expected=self.kinds,
                got=dtype,
                hint="convert the operands with astype first",
            )
        return case

    def cost(self, dtype: np.dtype, approx_math: bool = False) -> float:
        """What one element costs; nothing where there is no case, which is refused."""
        case = self._find(dtype, approx_math)
        return 0.0 if case is None else case.cycles

    def _find(self, dtype: np.dtype, approx_math: bool) -> Case | None:
        in_f32 = dtype == dtypes.F32 or self._widens(dtype)
        if approx_math and in_f32 and self.approx is not None:
            return self.approx
        return self.cases[dtypes.kind(dtype)]

    def _widens(self, dtype: np.dtype) -> bool:
        return self.widen and dtype in (dtypes.F16, dtypes.BF16)

    def result_dtype(self, dtype: np.dtype, to: np.dtype | None = None) -> np.dtype:
        """The dtype that the operation gives for a dtype of its operands."""
        if self.result == "any":
            if to is None:
                raise errors.InternalError(f"{self.name} needs the result's dtype")
            return to
        return dtypes.BOOL if self.result == "bool" else dtype

    def emitter(
        self,
        dtype: np.dtype,
        *,
        to: np.dtype | None = None,
        approx_math: bool = False,
        **params,
    ) -> Callable[..., ir.Value]:
        """The function from values to value; see `emit`."""
        chosen = self.case(dtype, approx_math).emit
        if self.result == "any":
            params["to"] = self.result_dtype(dtype, to)
        if not self._widens(dtype):
            return lambda *values: chosen(dtype, *values, **params)

        def widened(*values: ir.Value) -> ir.Value:
            wide = [resize_float(arith.extf, dtypes.F32, value) for value in values]
            result = chosen(dtypes.F32, *wide, **params)
            return resize_float(arith.truncf, dtype, result)

        return widened
