# SPDX-License-Identifier: Apache-2.0
"""The ready kernels without one of their waits or barriers: the emulator reports it."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from pallas_gpu import errors
from pallas_gpu import sparsecore as plsc
from pallas_gpu.emulator import run
from pallas_gpu.program.bodies import equations
from pallas_gpu.program.rewrite import Rewrite
from pallas_gpu.sparsecore.primitives.copies import copy_wait_p
from pallas_gpu.sparsecore.primitives.sync import subcore_barrier_p
from tests.support import tiers
from tests.support.sparsecore.op_cases import CASES

# One kernel each, with copies, adding streams, barriers and a pipeline among them.
_NAMES = ("embedding_lookup", "embedding_bag", "segment_sum of 32", "histogram")
_LEFT_OUT = (copy_wait_p, subcore_barrier_p)


class _Without(Rewrite):
    """A body without one of its equations."""

    def __init__(self, eqn):
        super().__init__()
        self._eqn = eqn

    def replacement(self, eqn, caller):
        return () if eqn is self._eqn else None


def _launch(name):
    """The kernel of a case, and its operands."""
    arguments = CASES[name].args(np.random.default_rng(3))
    if name == "embedding_lookup":  # several blocks for each subcore
        arguments[1] = np.resize(arguments[1], 32 * 16 * 4)
    launches = []

    def record(params, arrays):
        launches.append((params, arrays))
        return original(params, arrays)

    original = run.MACHINES["sparsecore"]
    run.MACHINES["sparsecore"] = record
    try:
        jax.block_until_ready(CASES[name].call(*arguments))
    finally:
        run.MACHINES["sparsecore"] = original
    ((params, arrays),) = launches
    return params, arrays


def _sites(jaxpr):
    return [eqn for eqn in equations(jaxpr) if eqn.primitive in _LEFT_OUT]


@pytest.mark.parametrize("name", _NAMES)
def test_a_wait_or_a_barrier_that_is_left_out_is_reported(name):
    params, arrays = _launch(name)
    found = list(dict.fromkeys(_sites(params.jaxpr)))
    assert found
    if not tiers.runs_everything():
        found = [tiers.one_of(name, found)]
    interpret = plsc.InterpretParams(schedules=4)
    for eqn in found:
        jaxpr = _Without(eqn).body(params.jaxpr)
        assert len(_sites(jaxpr)) < len(_sites(params.jaxpr))
        mutant = dataclasses.replace(params, jaxpr=jaxpr, interpret=interpret)
        with pytest.raises(errors.PallasGpuError) as caught:
            run.run(mutant, arrays)
        assert not isinstance(caught.value, errors.InternalError), str(caught.value)
