# SPDX-License-Identifier: Apache-2.0
"""Lane semantics: the author chooses the layouts, or they follow from the operands.

They are found while code is emitted, each from those of the operands. Only a loop whose
carry starts without a layout needs its body first: 1 kernel of 100 in the tests. To
collect the constraints of a program beforehand takes a third of the time of lowering.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pallas_gpu import errors, types
from pallas_gpu.emitters import module, smem
from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.moves import relayout
from pallas_gpu.emitters.registers import default_placement, spread_layout
from pallas_gpu.layouts import Layout, SmemLayout, WGSplatLayout, WGStridedLayout
from pallas_gpu.layouts.registers.placement import Placement, place, place_registers
from pallas_gpu.layouts.window import is_contiguous
from pallas_gpu.lowering import accesses, borders, scratch
from pallas_gpu.lowering.choice import agreement
from pallas_gpu.lowering.context import KernelState, RuleContext
from pallas_gpu.lowering.inference.collect import Slot
from pallas_gpu.program.nodes import Op

# Rows and columns of the smallest tile of the tensor core's layouts.
_WGMMA_TILE = 64, 8


@dataclasses.dataclass(frozen=True)
class Authored:
    """Chooses the layouts of arrays for the rules, which are common to the semantics.

    A rule names operands and results by their slots, as the relation of its primitive
    does.

    Attributes:
      infers: whether inference has chosen.
      made: the layouts of the results of operations, by their positions.
    """

    made: dict[Op, dict[Slot, Placement]] = dataclasses.field(
        default_factory=dict, kw_only=True
    )
    infers = False

    # --- memory -----------------------------------------------------------------------

    def smem(self, ctx: RuleContext, i: int, aval: Any) -> SmemLayout:
        """Returns the layout of the array in SMEM that a scope declares as its i-th."""
        return types.smem_layout(aval.shape, aval.dtype, aval.transforms)

    def loaded(
        self, ctx: RuleContext, handle: Any, view: Any, layout: Any
    ) -> Placement:
        """Returns the layout of a load.

        Args:
          handle: the reference.
          view: the part that is loaded.
          layout: the author's; None for none.
        """
        if layout is None:
            return _default_layout(handle, view)
        return place_registers(layout, tuple(view.shape))

    def stored(self, ctx: RuleContext, handle: Any, view: Any, value: Any) -> Any:
        """Returns a value in the layout in which it is stored to a part."""
        if isinstance(value, regs.Deferred):
            value = regs.placed(value, _default_layout(handle, view))
        if isinstance(view, smem.SmemView) and view.internal:
            value = agreement.to_store(ctx.kernel, view, value)
        return value

    # --- operands and results ---------------------------------------------------------

    def operand(self, ctx: RuleContext, x: Any, slot: Slot = 0) -> Any:
        """Returns an operand in its layout; a deferred array may remain so."""
        return x

    def placed(self, ctx: RuleContext, x: Any, slot: Slot = 0) -> regs.RegisterArray:
        """As `operand`, materialized in registers."""
        if not isinstance(x, regs.Deferred):
            return x
        try:
            return regs.placed(x)
        except errors.LayoutError:  # the operands of broadcasts are in other threads
            target = default_placement(x.shape, dtypes.bits(x.dtype))
            return agreement.in_layout(ctx.kernel, x, target, repeats_chosen=True)

    def linear(self, ctx: RuleContext, x: Any, slot: Slot = 0) -> regs.RegisterArray:
        """As `placed`, in a layout that has a linear form."""
        return agreement.linear(ctx.kernel, self.placed(ctx, x, slot))

    def alike(
        self,
        ctx: RuleContext,
        operands: Sequence[Any],
        slots: Sequence[Slot] | None = None,
    ) -> tuple[Any, ...]:
        """Returns the operands of an elementwise operation in one layout."""
        return agreement.agreed(ctx.kernel, operands)

    def cast(self, ctx: RuleContext, x: Any, layout: Any) -> Any:
        """Returns an array in a layout that the author has chosen."""
        placement = place(layout, x.shape)
        if isinstance(x, regs.Deferred) or isinstance(placement, WGSplatLayout):
            return relayout.layout_cast(x, placement)
        return scratch.relayouted(ctx.kernel, x, placement)

    def result(self, ctx: RuleContext, x: Any, slot: Slot) -> Any:
        """Returns a result in its layout."""
        if isinstance(x, regs.RegisterArray) and isinstance(slot, int):
            self.made.setdefault(ctx.op, {})[slot] = x.layout
        return x

    def target(self, ctx: RuleContext, slot: Slot) -> Placement | None:
        """Returns the layout of a result; None if it follows from the operands."""
        return None

    # --- loops and branches -----------------------------------------------------------

    def carried(
        self,
        ctx: RuleContext,
        carry: list[Any],
        emit: Callable[[list[Any]], list[Any]],
    ) -> list[Any]:
        """Returns the initial values of a loop's carry with a layout each.

        Args:
          emit: emits the body; returns its results.
        """
        return borders.place_carry(ctx.kernel, carry, emit)

    def of_branches(
        self, ctx: RuleContext, i: int, layouts: Callable[[], Sequence[Any]]
    ) -> Placement | None:
        """Returns the layout of the i-th result of a branch; None for the default.

        Args:
          layouts: returns the layout that the result has in each branch, None where it
            has none; emits the branches.
        """
        return next((layout for layout in layouts() if layout is not None), None)

    def fit(self, kernel: KernelState, value: Any, layout: Placement) -> Any:
        """Returns a value in the layout in which it crosses a region's border."""
        return borders.match(kernel, value, layout)


def _default_layout(handle: Any, view: Any) -> Any:
    """Returns the layout of a load that specifies none.

    An array tiled for the tensor core is loaded in WGMMA layout, any other in a strided
    one, or in one of powers of two where a strided one cannot be addressed.
    """
    shape = tuple(view.shape)
    tiled = isinstance(handle, smem.SmemView) and handle.layout.tiling is not None
    in_warp = module.current().issuer == "warp"
    whole = not any(n % tile for n, tile in zip(shape, _WGMMA_TILE, strict=False))
    if tiled and not in_warp and len(shape) == 2 and whole:
        return place(Layout.WGMMA, shape)
    placement = default_placement(shape, dtypes.bits(handle.dtype))
    window = view.window
    row_major = not (tiled or window.is_transposed) and is_contiguous(
        window.array_shape, window.sizes
    )
    if isinstance(placement, WGStridedLayout) and not row_major:
        return spread_layout(shape)
    if tiled and accesses.by_element(view, placement, "load"):
        return spread_layout(shape)
    return placement
