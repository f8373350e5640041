# SPDX-License-Identifier: Apache-2.0
"""Rules for the arguments that all ready kernels pass on."""

from __future__ import annotations

from typing import Any

import pallas_gpu as plgpu
from pallas_gpu import expect

PARAMS = expect.optional(
    expect.instance(plgpu.CompilerParams, written="plgpu.CompilerParams(...)")
)
INTERPRET = expect.optional(
    expect.instance(
        bool, plgpu.InterpretParams, written="True, False or plgpu.InterpretParams(...)"
    )
)


def is_axis(value: Any) -> bool:
    """True for the name of an output dimension of a matrix product."""
    return isinstance(value, str) and value in ("m", "n")
