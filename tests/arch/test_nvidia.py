# SPDX-License-Identifier: Apache-2.0
"""NVIDIA targets: lookup, features, limits."""

from __future__ import annotations

import pytest

from pallas_gpu import arch, errors
from pallas_gpu.arch import Feature
from tests.support.refusal import refused


@pytest.mark.parametrize("name", ["sm_90a", "sm_100a", "sm_103a"])
def test_a_target_is_found_by_name_and_by_capability(name):
    target = arch.target(name)
    assert target.name == name
    assert arch.target(target) is target
    assert arch.target_of_capability(*target.compute_capability) is target


@pytest.mark.parametrize("name", ["sm_80", "h100", None, 90])
def test_an_unknown_target_is_refused_with_the_known_ones(name):
    with pytest.raises(errors.TargetError) as info:
        arch.target(name)
    assert info.value.expected == "sm_90a or sm_100a or sm_103a"
    assert info.value.got == repr(name)


@refused
def test_an_unknown_gpu_is_refused():
    arch.target_of_capability(8, 0)


@pytest.mark.parametrize(
    ("feature", "owner", "other"),
    [
        (Feature.WGMMA, "sm_90a", "sm_100a"),
        (Feature.TCGEN05, "sm_100a", "sm_90a"),
        (Feature.TMEM, "sm_100a", "sm_90a"),
        (Feature.TCGEN05_INT8, "sm_100a", "sm_103a"),
        (Feature.CLUSTER_LAUNCH_CONTROL, "sm_100a", "sm_90a"),
    ],
)
@refused
def test_a_missing_feature_names_the_targets_that_have_it(feature, owner, other):
    arch.target(owner).require(feature, "the step")
    arch.target(other).require(feature, "the step")


@pytest.mark.parametrize("feature", [Feature.TMA, Feature.MBARRIER_TX, Feature.CLUSTER])
def test_all_targets_copy_asynchronously(feature):
    assert all(target.has(feature) for target in arch.TARGETS.values())


@pytest.mark.parametrize("target", arch.TARGETS.values(), ids=arch.TARGETS)
def test_limits_agree_with_each_other(target):
    # The static variable of a launch takes 16 bytes.
    assert target.smem_bytes_per_block == target.smem_bytes_per_sm - 1024 - 16
    assert (target.tmem_columns > 0) == target.has(Feature.TMEM)
    assert target.max_threads_per_block <= target.max_threads_per_sm
