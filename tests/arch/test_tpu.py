# SPDX-License-Identifier: Apache-2.0
"""TPU targets: lookup, features, limits."""

from __future__ import annotations

import pytest

from pallas_gpu import arch, errors
from pallas_gpu.arch import tpu


@pytest.mark.parametrize("name", ["v5p", "v6e", "tpu7x"])
def test_a_chip_is_found_by_name(name):
    target = tpu.target(name)
    assert target.name == name
    assert tpu.target(target) is target
    assert isinstance(target, arch.Target)
    assert target.machine == "sparsecore"


@pytest.mark.parametrize("name", ["v5e", "sm_90a", None])
def test_an_unknown_chip_is_refused_with_the_known_ones(name):
    with pytest.raises(errors.TargetError) as info:
        tpu.target(name)
    assert info.value.expected == "v5p or v6e or tpu7x"


@pytest.mark.parametrize("target", tpu.TARGETS.values(), ids=tpu.TARGETS)
def test_the_vmem_of_all_subcores_fills_the_pool(target):
    assert target.subcores * target.vmem_words == target.pool_words
    assert min(target.budgets.values()) > 0


def test_a_missing_feature_names_the_chips_that_have_it():
    tpu.TPU7X.require(tpu.Feature.ROUND_TO_EVEN, "the step")
    with pytest.raises(
        errors.TargetError, match="the step needs an instruction"
    ) as info:
        tpu.V5P.require(tpu.Feature.ROUND_TO_EVEN, "the step")
    assert info.value.expected == "one of the targets tpu7x"
