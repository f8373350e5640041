# SPDX-License-Identifier: Apache-2.0
"""Who chooses the layouts of arrays: the author (Lane) or inference (Warpgroup).

Everything else is common to the two semantics: a rule asks here for its operands, and
names them by their slots, as the relation of its primitive does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pallas_gpu.layouts import SmemLayout
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.mosaic import registers as regs

# A number or a name of an operand or a result of an operation.
Slot = int | str


class Chooser(Protocol):
    """`ctx` is the `RuleContext` of an operation, `kernel` a `KernelState`.

    Attributes:
      infers: whether inference has chosen.
    """

    infers: bool

    # --- memory -----------------------------------------------------------------------

    def smem(self, ctx: Any, i: int, aval: Any) -> SmemLayout:
        """Returns the layout of the array in SMEM that a scope declares as its i-th."""

    def loaded(self, ctx: Any, handle: Any, view: Any, layout: Any) -> Placement:
        """Returns the layout of a load.

        Args:
          handle: the reference.
          view: the part that is loaded.
          layout: the author's; None for none.
        """

    def stored(self, ctx: Any, handle: Any, view: Any, value: Any) -> Any:
        """Returns a value in the layout in which it is stored to a part."""

    # --- operands and results ---------------------------------------------------------

    def operand(self, ctx: Any, x: Any, slot: Slot = 0) -> Any:
        """Returns an operand in its layout; a deferred array may remain so."""

    def placed(self, ctx: Any, x: Any, slot: Slot = 0) -> regs.RegisterArray:
        """As `operand`, materialized in registers."""

    def linear(self, ctx: Any, x: Any, slot: Slot = 0) -> regs.RegisterArray:
        """As `placed`, in a layout that has a linear form."""

    def alike(
        self, ctx: Any, operands: Sequence[Any], slots: Sequence[Slot] | None = None
    ) -> tuple[Any, ...]:
        """Returns the operands of an elementwise operation in one layout."""

    def cast(self, ctx: Any, x: Any, layout: Any) -> Any:
        """Returns an array in a layout that the author has chosen."""

    def result(self, ctx: Any, x: Any, slot: Slot) -> Any:
        """Returns a result in its layout."""

    def target(self, ctx: Any, slot: Slot) -> Placement | None:
        """Returns the layout of a result; None if it follows from the operands."""

    # --- loops and branches -----------------------------------------------------------

    def carried(
        self, ctx: Any, carry: list[Any], emit: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:
        """Returns the initial values of a loop's carry with a layout each.

        Args:
          emit: emits the body; returns its results.
        """

    def of_branches(
        self, ctx: Any, i: int, layouts: Callable[[], Sequence[Any]]
    ) -> Placement | None:
        """Returns the layout of the i-th result of a branch; None for the default.

        Args:
          layouts: returns the layout that the result has in each branch, None where it
            has none; emits the branches.
        """

    def fit(self, kernel: Any, value: Any, layout: Placement) -> Any:
        """Returns a value in the layout in which it crosses a region's border."""
