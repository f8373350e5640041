# SPDX-License-Identifier: Apache-2.0
"""The ready kernels without one of their waits or barriers: the emulator sees it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import tiers
from tests.support.sparsecore import plan_mutants
from tests.support.sparsecore.op_cases import CASES

# Those with the waits and barriers of all others among theirs.
_QUICK = ("embedding_bag", "segment_sum")


@pytest.mark.parametrize("name", CASES)
def test_a_missing_wait_or_barrier_is_seen(name):
    if not tiers.runs_everything() and name not in _QUICK:
        pytest.skip("its waits are those of the others")
    case = CASES[name]
    args = case.args(np.random.default_rng(len(name)))
    count, unseen = plan_mutants.survivors(case.call, *args)
    assert count >= 2
    assert unseen == []
