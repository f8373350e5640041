# SPDX-License-Identifier: Apache-2.0
"""A ring of producers and consumers: the hint of each mistake, and no false alarm."""

from __future__ import annotations

import inspect
import re

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.mutations.test_mutants import ids, run
from tests.support import everywhere
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


# --- a ring in GMEM -------------------------------------------------------------------

STEPS, SLOTS = 5, 2
X = np.arange(STEPS * 128, dtype=np.float32).reshape(STEPS, 128)


def signalled(back_pressure):
    """CTA 0 hands rows to CTA 1 by way of GMEM, with semaphores."""
    regular = plgpu.SemaphoreType.REGULAR

    def body(x, o, ring):
        ready, free = plgpu.get_global(regular), plgpu.get_global(regular)

        @plgpu.when(lax.axis_index("i") == 0)
        def _():
            @plgpu.loop(0, STEPS)
            def _(k):
                if back_pressure:
                    plgpu.when(k >= SLOTS)(lambda: plgpu.semaphore_wait(free))
                ring[lax.rem(k, SLOTS)] = x[k]  # write
                plgpu.semaphore_signal(ready)

            if back_pressure:
                plgpu.semaphore_wait(free, SLOTS)

        @plgpu.when(lax.axis_index("i") == 1)
        def _():
            @plgpu.loop(0, STEPS)
            def _(k):
                plgpu.semaphore_wait(ready)
                o[k] = ring[lax.rem(k, SLOTS)]  # read
                if back_pressure:
                    plgpu.semaphore_signal(free)

    scratch = plgpu.GMEM((SLOTS, 128), jnp.float32)
    return everywhere.kernel(body, X, scratch, grid={"i": 2})


def test_signals_with_back_pressure_raise_no_alarm():
    for seed in range(10):
        result = signalled(True)(plgpu.InterpretParams(seed=seed))(X)
        np.testing.assert_array_equal(result, X)


def test_signals_without_back_pressure_are_a_race():
    for seed in range(10):
        with pytest.raises(errors.RaceError) as caught:
            signalled(False)(plgpu.InterpretParams(seed=seed))(X)
        source = inspect.getsource(signalled).splitlines()
        start = signalled.__code__.co_firstlineno
        for mark in ("# write", "# read"):
            (line,) = (i for i, text in enumerate(source, start) if mark in text)
            assert f"test_ring.py:{line} " in str(caught.value)
        assert "semaphore_wait before the second" in caught.value.hint
