# SPDX-License-Identifier: Apache-2.0
"""The demo's kernels run as emitted, under both semantics, against float64."""

from __future__ import annotations

import pytest

from demo import kernels as demo
from demo import matmul as demo_matmul
from tests.support.lockstep import kernels as in_lockstep
from tests.support.semantics import BOTH

JOBS = [
    demo.scale_and_add_job((100, 200)),
    demo.shifted_exp_job(128),
    demo_matmul.matmul_job(256, 256, 128),
    demo_matmul.blackwell_matmul_job(256, 256, 128),
]


@pytest.mark.smoke
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
@pytest.mark.parametrize("semantics", BOTH)
def test_a_kernel_of_the_demo_computes_its_reference(job, semantics):
    (result,) = in_lockstep.run(job.function, job.arguments, semantics)
    assert job.error(result) <= job.tolerance
