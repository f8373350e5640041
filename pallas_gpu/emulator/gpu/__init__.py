# SPDX-License-Identifier: Apache-2.0
"""The emulated GPU, and a rule file per family; importing it registers the rules."""

from __future__ import annotations

from pallas_gpu.emulator.gpu import mbarrier, refs, registers, scoped, tma, wgmma

__all__ = ["mbarrier", "refs", "registers", "scoped", "tma", "wgmma"]
