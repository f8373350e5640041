# SPDX-License-Identifier: Apache-2.0
"""Random correct kernels: nothing is reported, everything agrees, libtpu compiles."""

from __future__ import annotations

import pytest

from tests.support.sparsecore import random_kernels
from tests.support.sparsecore.kernels import check


@pytest.mark.parametrize("seed", range(10))
def test_a_random_kernel_is_correct_everywhere(seed):
    made = random_kernels.program(seed)
    check(made.body, made.args, made.expected, *made.scratch,
          subcores=random_kernels.SUBCORES, chips=["tpu7x"])  # fmt: skip
