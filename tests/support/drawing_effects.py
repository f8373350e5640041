# SPDX-License-Identifier: Apache-2.0
"""The effects of the arguments of drawings, for tests/public/test_effects.py."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pallas_gpu as plgpu
from pallas_gpu import layouts
from tests.support import effects as see

_DRAWS = {
    "layouts.draw": functools.partial(layouts.draw, plgpu.Layout.WGMMA),
    "TiledLayout.draw": layouts.to_layout(plgpu.Layout.WGMMA).draw,
}


def _shapes(draw: Callable) -> list[str]:
    return see.values(draw, {"shape": (64, 8)}, {"shape": (64, 16)})


def _parts(draw: Callable) -> list[str]:
    parts = (None, (slice(0, 2), slice(0, 4)))
    return see.values(draw, *({"shape": (64, 8), "part": part} for part in parts))


EFFECTS: dict[str, Callable[[], list[str]] | str] = {
    f"{name}.{parameter}": functools.partial(effect, draw)
    for name, draw in _DRAWS.items()
    for parameter, effect in (("shape", _shapes), ("part", _parts))
}
