# SPDX-License-Identifier: Apache-2.0
"""The cost of a warp's access to shared memory.

Shared memory has 32 banks of 4 bytes; one wavefront serves one word of each bank. Lanes
that access the same word share it (CUDA C++ Programming Guide, "Shared Memory"). An
access wider than 4 bytes is served in phases of 16 lanes (8 bytes) or 8 lanes (16
bytes), as is each 8-row matrix of ldmatrix. The guide does not describe the phases for
current GPUs: they are a model, which wavefront counts of a profiler can confirm.
"""

from __future__ import annotations

import numpy as np

BANKS = 32
BANK_BYTES = 4


def phase_lanes(width_bytes: int) -> int:
    """The maximum number of lanes that one wavefront can serve."""
    return 32 // max(1, width_bytes // BANK_BYTES)


def wavefronts_of(addresses: np.ndarray, width_bytes: int) -> np.ndarray:
    """The wavefronts of many accesses at once.

    Args:
      addresses: byte addresses, integers of shape [..., lanes]; lanes is a multiple of
        `phase_lanes(width_bytes)`.
      width_bytes: 1, 2, 4, 8 or 16 bytes per lane.

    Returns:
      Integers of shape [...].
    """
    lanes = phase_lanes(width_bytes)
    batch = addresses.shape[:-1]
    words_per_lane = max(1, width_bytes // BANK_BYTES)
    first = addresses.reshape(-1, lanes, 1) // BANK_BYTES
    words = (first + np.arange(words_per_lane)).reshape(-1, lanes * words_per_lane)
    words = np.sort(words, axis=1)
    new = np.ones(words.shape, dtype=bool)
    new[:, 1:] = words[:, 1:] != words[:, :-1]
    rows = np.arange(len(words))[:, None]
    slots = (rows * BANKS + words % BANKS)[new]
    counts = np.bincount(slots, minlength=len(words) * BANKS).reshape(-1, BANKS)
    per_phase = counts.max(axis=1).reshape(*batch, -1)
    return per_phase.sum(axis=-1)


def ideal_wavefronts(lanes: int, width_bytes: int) -> int:
    """The wavefronts without bank conflicts."""
    return max(1, lanes // phase_lanes(width_bytes))
