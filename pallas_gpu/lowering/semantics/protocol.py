# SPDX-License-Identifier: Apache-2.0
"""What differs between the semantics: how references are represented, read, written.

Rules that both semantics share delegate the differences to the kernel's semantics. A
rule that has nothing in common with its counterpart is registered for one kind only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from pallas_gpu.lowering import values as vals
from pallas_gpu.mosaic import addressing
from pallas_gpu.primitives._registry import RuleKind
from pallas_gpu.types import LoweringSemantics

Layouts = Callable[[], Sequence[Any]]


class Semantics(Protocol):
    """One of the two semantics. `kernel` is a `KernelState`, `ctx` a `RuleContext`."""

    @property
    def rule_kind(self) -> RuleKind:
        """Which rules lower the jaxpr."""

    @property
    def keeps_lines(self) -> bool:
        """Whether operations have source locations even if the output has none."""

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that turn the rules' output into the code of a thread."""

    # --- references -------------------------------------------------------------------

    def gmem_handle(self, kernel: Any, handle: vals.GmemHandle) -> Any:
        """Returns the handle of an operand or a result of the kernel."""

    def smem_handle(
        self,
        ctx: Any,
        i: int,
        aval: Any,
        offset_bytes: int,
        row_major: bool = False,
        distance: addressing.Distance | None = None,
    ) -> Any:
        """Returns the handle of an array at its offset in the block's SMEM.

        Args:
          i: its number in the scope.
          aval: the type of its reference.
          offset_bytes: the offset; of what each warp or warpgroup has its own, that of
            the first.
          row_major: whether it has to be, where its type leaves that open.
          distance: from one's to the next one's; None for what the block shares.
        """

    def part(self, ctx: Any, handle: Any, transforms: Any) -> Any:
        """Returns a part of a reference in the form that instructions use."""

    def read(
        self,
        ctx: Any,
        handle: Any,
        transforms: Any,
        layout: Any,
        optimized: bool | None,
    ) -> Any:
        """Loads a part of a reference, in a layout if one is specified.

        Bank conflicts are an error if `optimized`; None avoids them where possible.
        """

    def read_for(self, ctx: Any, handle: Any, transforms: Any, other: Any) -> Any:
        """Loads a part of a reference to combine it with another value, or None."""

    def write(
        self,
        ctx: Any,
        handle: Any,
        transforms: Any,
        value: Any,
        optimized: bool | None = None,
    ) -> None:
        """Stores to a part of a reference, ordered with the warpgroup's accesses.

        Bank conflicts as in `read`.
        """

    def tmem_allocation(self, kernel: Any) -> Any:
        """Allocates the TMEM of the block; returns what `KernelState.tmem` stores."""

    def tmem_handle(self, kernel: Any, aval: Any, first_column: int) -> vals.TmemHandle:
        """Returns the handle of an array in TMEM."""

    # --- values -----------------------------------------------------------------------

    def operand(self, ctx: Any, x: Any, slot: Any = 0) -> Any:
        """Returns an operand in its assigned layout, if it has one."""

    def placed(self, ctx: Any, x: Any, slot: Any = 0) -> Any:
        """As `operand`, materialized in registers."""

    def linear(self, ctx: Any, x: Any, slot: Any = 0) -> Any:
        """As `placed`, in a layout that has a linear form."""

    def result(self, ctx: Any, x: Any, slot: Any) -> Any:
        """Returns a result in its assigned layout, if it has one."""

    def target(self, ctx: Any, slot: Any) -> Any:
        """Returns the assigned layout of a result, if it has one."""

    def alike(self, ctx: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the operands of an elementwise operation in one layout."""

    def carried(
        self, ctx: Any, carry: list[Any], emit: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:
        """Returns the initial values of a loop's carry with a layout each.

        Args:
          emit: emits the body; returns its results.
        """

    def fit(self, kernel: Any, value: Any, layout: Any) -> Any:
        """Returns a value in the layout in which it crosses a region's border."""

    def add(self, ctx: Any, a: Any, b: Any) -> Any:
        """Adds two values of one type."""

    def layout_cast(self, ctx: Any, x: Any, layout: Any) -> Any:
        """Returns an array in a layout."""

    def packed(
        self,
        ctx: Any,
        i: int,
        dtype: np.dtype,
        shape: tuple[int, ...],
        layouts: Layouts,
    ) -> vals.Packed:
        """Returns how a branch's result crosses the border of its region.

        Args:
          i: its number.
          layouts: returns the layout that the result has in each branch, None where it
            has none; emits the branches.
        """

    # --- accumulators -----------------------------------------------------------------

    def accumulator(self, value: Any, shape: tuple[int, ...]) -> Any:
        """Returns a value as the register state of an accumulator."""

    def fenced(self, whole: Any) -> Any:
        """Returns an accumulator after a wait, above which no use can be scheduled."""

    def columns(self, whole: Any, starts: Sequence[int], sizes: Sequence[int]) -> Any:
        """Returns a part of an accumulator."""

    def with_columns(self, whole: Any, starts: Sequence[int], part: Any) -> Any:
        """Returns an accumulator with a part replaced."""


_SEMANTICS: dict[LoweringSemantics, Semantics] = {}
_INFERRED: list[Callable[[Any], Semantics]] = []


def enter(name: LoweringSemantics, semantics: Semantics) -> None:
    """Registers the semantics of a value of `LoweringSemantics`."""
    _SEMANTICS[name] = semantics


def enter_inferred(make: Callable[[Any], Semantics]) -> None:
    """Registers what makes the semantics of a program with inferred layouts."""
    _INFERRED.append(make)


def inferred(layouts: Any) -> Semantics:
    """Returns the semantics of a program with inferred layouts."""
    (make,) = _INFERRED
    return make(layouts)


def of(name: LoweringSemantics) -> Semantics:
    """Returns the semantics of a value of `LoweringSemantics`."""
    return _SEMANTICS[name]
