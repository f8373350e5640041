# SPDX-License-Identifier: Apache-2.0
"""Warpgroups of a block with different roles: one produces, the others consume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pallas_gpu as plgpu


def split(
    wg: Any,
    consumers: int,
    registers: tuple[int, int],
    produce: Callable[[], Any],
    consume: Callable[[], Any],
    *,
    two_branches: bool = False,
) -> None:
    """Runs `produce` in the last warpgroup, and `consume` in those before it."""
    plgpu.Roles(consumers, registers, two_branches).run(wg, produce, consume)
