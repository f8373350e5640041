# SPDX-License-Identifier: Apache-2.0
"""Loads from TMEM that reduce what a thread loads (PTX ISA: tcgen05.ld.red)."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from pallas_gpu.lockstep.votes import extremes

# Of floats NaN has to be asked for; integers have neither it nor absolute values. The
# other shape, 16x32bx2, and a single repetition are not here.
_FORM = re.compile(
    r"tcgen05\.ld\.red\.sync\.aligned\.32x32b\.x(2|4|8|16|32|64|128)\.(min|max)"
    r"(?:(|\.abs)\.NaN\.f32|\.([us]32))"
)


def form_of(opcode: str) -> tuple[int, Callable[[np.ndarray], np.ndarray]] | None:
    """The repetitions of a load, and what it makes of the words of each thread."""
    match = _FORM.fullmatch(opcode)
    if match is None:
        return None
    repetitions, kind, absolute, integer = match.groups()

    def reduced(words: np.ndarray) -> np.ndarray:
        words = np.ascontiguousarray(words)
        if integer:
            each = words.view(np.int32 if integer == "s32" else np.uint32)
            return getattr(each, kind)(axis=1).view(np.uint32)
        floats = words.view(np.float32)
        floats = np.abs(floats) if absolute else floats
        return extremes(f"f{kind}", floats).view(np.uint32)

    return int(repetitions), reduced
