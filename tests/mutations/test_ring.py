# SPDX-License-Identifier: Apache-2.0
"""A ring of producers and consumers: the hint of each mistake, and no false alarm."""

from __future__ import annotations

import re

import pytest

from pallas_gpu import errors
from tests.mutations.test_mutants import ids, run
from tests.support.mutations.mutant import Switches
from tests.support.mutations.tensor_cores.ring import HINTS, SUBJECT


@pytest.mark.parametrize("seed", range(10))
def test_the_ring_raises_no_alarm(seed):
    assert run(SUBJECT.make(Switches()), seed=seed)


@pytest.mark.parametrize("mutant", SUBJECT.mutants, ids=ids)
def test_the_hint_of_a_mistake_says_what_to_do(mutant):
    for seed in range(3):
        with pytest.raises(errors.PallasGpuError) as caught:
            run(SUBJECT.make(Switches(mutant.name)), seed=seed)
        assert re.search(HINTS[mutant.name], caught.value.hint or "")
