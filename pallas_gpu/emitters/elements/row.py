# SPDX-License-Identifier: Apache-2.0
"""A row of the table of elementwise operations, and the facts derived from it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.emitters.elements import arith, dtypes, packed
from pallas_gpu.emitters.elements.arithmetic import Emitter, bound
from pallas_gpu.emitters.elements.convert import conversion
from pallas_gpu.layouts.moves import rates

NARROW_FLOATS: tuple[dtypes.Kind, ...] = ("float8", "float4", "exponent")
# Of the functions of float32 and float64 that are no approximations.
EXACT_ULPS = 4
_UP_TO_ONE = ("tanh", "logistic", "sin", "cos")


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation for one kind of dtype.

    Attributes:
      emit: called with the dtype, a value per operand, and the row's parameters.
      cycles: issue cycles for one element in each thread, used by the cost model of
        layout inference for replicated elements; see `layouts/moves/rates`.
      rtol, atol: of an approximation, bounds of its error relative to the result and
        beside that; a rtol of None: it has no bound.
    """

    emit: Emitter
    cycles: float = rates.ELEMENT
    rtol: float | None = None
    atol: float = 0.0


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation; its case is None for unsupported kinds of dtype.

    Attributes:
      name: lax's name of the primitive.
      floating, signed, unsigned, boolean: the case for such operands. Narrow floats
        are computed in f32 and rounded once.
      narrow_float: the case for narrow floats as they are: float8, float4, exponents.
      low_bits: the low bits of the result depend only on those of the operands, so
        integers of 2 and 4 bits need no extension.
      extension: how integers of 2 and 4 bits are extended to bytes.
      params: the primitive's parameters that the emitters use.
      typed_by: the operand whose dtype selects the case.
      result: the dtype of the result: that of the operands, bool, or any, which is
        passed to the emitter as `to`.
      widen: f16 and bf16 are computed in f32 and rounded once.
      approx: the emitter for f32 under `approx_math`.
    """

    name: str
    floating: Case | None = None
    signed: Case | None = None
    unsigned: Case | None = None
    boolean: Case | None = None
    narrow_float: Case | None = None
    low_bits: bool = False
    extension: Literal["own", "unsigned", "signed"] = "own"
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
                    "approximation but no emitter for floats"
                )
        for case in given:
            if not callable(case.emit):
                raise errors.InternalError(
                    f"The row {self.name!r} of the elementwise table has no emitter",
                    got=repr(case.emit),
                )

    @functools.cached_property
    def cases(self) -> dict[dtypes.Kind, Case | None]:
        """The cases by kind of dtype."""
        narrow = self.narrow_float or self.floating
        return {
            "float": self.floating,
            "signed": self.signed,
            "unsigned": self.unsigned,
            "bool": self.boolean,
            **dict.fromkeys(NARROW_FLOATS, narrow),
        }

    @property
    def kinds(self) -> list[dtypes.Kind]:
        """The kinds of dtype that the operation supports."""
        return [kind for kind, case in self.cases.items() if case is not None]

    def case(self, dtype: np.dtype, approx_math: bool = False) -> Case:
        """The case of a dtype.

        Raises:
          DTypeError: the operation does not support the dtype.
        """
        case = self._find(dtype, approx_math)
        if case is None:
            raise self._refusal(dtype, self.kinds)
        return case

    def require_combining(self, dtype: np.dtype) -> None:
        """Raises DTypeError unless a reduction or a scan combines such elements."""
        if dtypes.kind(dtype) == "exponent":
            # It has no zero and no infinity from which to start.
            raise self._refusal(dtype, [k for k in self.kinds if k != "exponent"])
        self.case(dtype)

    def _refusal(self, dtype: np.dtype, kinds: list[dtypes.Kind]) -> errors.DTypeError:
        return errors.DTypeError(
            f"{self.name} does not support {dtype} operands",
            expected=kinds,
            got=dtype,
            hint="convert the operands with astype first",
        )

    def cost(self, dtype: np.dtype, approx_math: bool = False) -> float:
        """The cost of one element; 0 for unsupported dtypes, which `case` rejects."""
        case = self._find(dtype, approx_math)
        return 0.0 if case is None else case.cycles

    def approximates(self, dtype: np.dtype, tolerance: Any) -> bool:
        """Whether the approximation is within a `jax.lax.Tolerance`."""
        eps = float(ml_dtypes.finfo(dtype).eps)
        # Narrow floats are rounded once, to half an ulp; bounds of others include that.
        is_narrow = dtype.itemsize <= 2
        exact = 1 if is_narrow else EXACT_ULPS
        # Where no result exceeds 1, a relative error is no larger as an absolute one.
        relative = max(tolerance.rtol, tolerance.atol * (self.name in _UP_TO_ONE))
        if max(relative, tolerance.ulps * eps) < exact * eps:
            raise errors.UnsupportedError(
                f"{self.name}: no implementation is within the tolerance",
                expected=f"ulps >= {exact} or rtol >= {exact * eps:.2g} for {dtype}",
                got=f"ulps={tolerance.ulps}, rtol={tolerance.rtol:g}, "
                f"atol={tolerance.atol:g}",
                hint="accuracy=jax.lax.AccuracyMode.HIGHEST is the most accurate one",
            )
        case = self.approx
        if case is None or case.rtol is None:
            return False
        rounded = eps / 2 if is_narrow else 0.0
        rtol = max(relative - rounded, (tolerance.ulps * eps - rounded) / 2)
        return case.rtol <= rtol and case.atol <= tolerance.atol

    def _find(self, dtype: np.dtype, approx_math: bool) -> Case | None:
        in_f32 = dtype == dtypes.F32 or self._widens(dtype)
        if approx_math and in_f32 and self.approx is not None:
            return self.approx
        return self.cases[dtypes.kind(dtype)]

    def _widens(self, dtype: np.dtype) -> bool:
        if dtypes.kind(dtype) in NARROW_FLOATS:
            return self.narrow_float is None
        return self.widen and dtype in (dtypes.F16, dtypes.BF16)

    def result_dtype(self, dtype: np.dtype, to: np.dtype | None = None) -> np.dtype:
        """The dtype of the result for a dtype of the operands."""
        if self.result == "any":
            if to is None:
                raise errors.InternalError(f"{self.name} requires the result's dtype")
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
        """The function from operand values to the result value; see `emit`."""
        chosen = self.case(dtype, approx_math).emit
        if self.result == "any":
            params["to"] = self.result_dtype(dtype, to)
        if dtypes.is_packed(dtype) and dtypes.kind(dtype) in ("signed", "unsigned"):
            return self._of_bytes(dtype, chosen, params)
        if not self._widens(dtype):
            return bound(chosen, dtype, **params)

        compute = bound(chosen, dtypes.F32, **params)
        widen, narrow = conversion(dtype, dtypes.F32), conversion(dtypes.F32, dtype)

        def widened(*values: ir.Value) -> ir.Value:
            result = compute(*map(widen, values))
            return result if self.result == "bool" else narrow(result)

        return widened

    def _of_bytes(
        self, dtype: np.dtype, chosen: Emitter, params: dict
    ) -> Callable[..., ir.Value]:
        """Integers of 2 and 4 bits: computed in bytes, whose upper bits are anything.

        A quotient or a sum that does not fit wraps by losing those bits.
        """
        if self.result == "any" or self.low_bits:
            return bound(chosen, dtype, **params)
        own = dtypes.kind(dtype)
        signed = (own if self.extension == "own" else self.extension) == "signed"
        held = dtypes.I8 if signed else dtypes.U8
        above = 8 - dtypes.stored_bits(dtype)

        def compute(*values: ir.Value) -> ir.Value:
            wide = [packed.extended(v, dtype, signed=signed) for v in values]
            result = chosen(held, *wide, **params)
            if self.name == "clz":
                result = arith.subi(result, dtypes.constant(above, held, result))
            return result

        return compute
