# SPDX-License-Identifier: Apache-2.0
"""Kernels whose devices access each other's memory, with their mutants."""

from __future__ import annotations

from tests.support.mutations.devices import (
    all_reduce,
    credits,
    exchange,
    flags,
    gather,
    handshake,
    multimem,
    ring,
)

SUBJECTS = tuple(
    module.SUBJECT
    for module in (
        ring,
        gather,
        all_reduce,
        credits,
        exchange,
        multimem,
        flags,
        handshake,
    )
)
