# SPDX-License-Identifier: Apache-2.0
"""Rules of Warpgroup semantics: arrays are vectors and memrefs, layouts come later."""

from pallas_gpu.lowering.warpgroup import elementwise, registers, shapes, tma, wgmma

__all__ = ["elementwise", "registers", "shapes", "tma", "wgmma"]
