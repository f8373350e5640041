# SPDX-License-Identifier: Apache-2.0
"""Where elements are stored, in pure integers. Depends on neither JAX nor MLIR."""

from pallas_gpu.layouts.drawing.draw import draw as draw
from pallas_gpu.layouts.drawing.drawing import Drawing as Drawing
from pallas_gpu.layouts.gmem.tma_plan import TmaInstruction as TmaInstruction
from pallas_gpu.layouts.gmem.tma_plan import TmaPlan as TmaPlan
from pallas_gpu.layouts.gmem.tma_plan import plan_copy as plan_copy
from pallas_gpu.layouts.gmem.tma_plan import plan_prefetch as plan_prefetch
from pallas_gpu.layouts.moves import rates as rates
from pallas_gpu.layouts.moves.relayout import RelayoutPlan as RelayoutPlan
from pallas_gpu.layouts.moves.relayout import plan_relayout as plan_relayout
from pallas_gpu.layouts.registers.catalogue import Layout as Layout
from pallas_gpu.layouts.registers.catalogue import element_bits as element_bits
from pallas_gpu.layouts.registers.catalogue import to_layout as to_layout
from pallas_gpu.layouts.registers.defaults import default_layout as default_layout
from pallas_gpu.layouts.registers.descriptions import RegisterLayout as RegisterLayout
from pallas_gpu.layouts.registers.descriptions import Replicated as Replicated
from pallas_gpu.layouts.registers.descriptions import TiledLayout as TiledLayout
from pallas_gpu.layouts.registers.descriptions import Tiling as Tiling
from pallas_gpu.layouts.registers.descriptions import WGSplatLayout as WGSplatLayout
from pallas_gpu.layouts.registers.descriptions import WGStridedLayout as WGStridedLayout
from pallas_gpu.layouts.registers.linear import LinearLayout as LinearLayout
from pallas_gpu.layouts.smem.access import plan_access as plan_access
from pallas_gpu.layouts.smem.access_plan import AccessPlan as AccessPlan
from pallas_gpu.layouts.smem.layout import SmemLayout as SmemLayout
from pallas_gpu.layouts.smem.stagger import Stagger as Stagger
from pallas_gpu.layouts.tmem.access import transfers as transfers
from pallas_gpu.layouts.tmem.layout import TmemKind as TmemKind
from pallas_gpu.layouts.tmem.layout import TmemLayout as TmemLayout

# Public; the other names are imported from here by the rest of this package.
__all__ = [
    "Layout",
    "TiledLayout",
    "Tiling",
    "Replicated",
    "WGStridedLayout",
    "WGSplatLayout",
    "LinearLayout",
    "TmemLayout",
    "TmemKind",
    "Drawing",
    "draw",
]


def __dir__() -> list[str]:
    return sorted(__all__)
