# SPDX-License-Identifier: Apache-2.0
"""Kernels at the edges, made by chance: what the emulator accepts lowers, and runs.

More of them: `PALLAS_GPU_RANDOM_EDGES=1000:2000 pytest tests/lowering/...`.
"""

from __future__ import annotations

import os

import pytest

import pallas_gpu as plgpu
from tests.support import acceptance, random_edges
from tests.support.semantics import Lane

errors = plgpu.errors
FIRST, LAST = map(int, os.environ.get("PALLAS_GPU_RANDOM_EDGES", "0:60").split(":"))
# Only a run shows that a start known at run time is wrong.
AT_RUN_TIME = errors.LayoutError, errors.OutOfBoundsError


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_emulator_and_lowering_accept_the_same_kernels(seed):
    program = random_edges.make(seed)
    verdict = acceptance.judge(program.function, program.arguments)
    for error in verdict.refusals:
        assert not isinstance(error, errors.InternalError), error
        assert error.where and error.got is not None, error
    if verdict.traced is not None:
        return
    refusals = {who: e for who, e in verdict.lowered.items() if e is not None}
    if program.kind == "product" and "tiled for the tensor core" in str(
        refusals.get(Lane)
    ):
        # Under Lane semantics operands are stored as the tensor core needs them, which
        # the trace checks; these kernels were traced under Warpgroup.
        del refusals[Lane]
    if program.dynamic and isinstance(verdict.emulated, AT_RUN_TIME):
        assert not refusals
        return
    assert (verdict.emulated, refusals) == (None, {})
