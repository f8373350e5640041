# SPDX-License-Identifier: Apache-2.0
"""NVIDIA targets: lookup, features, limits."""

from __future__ import annotations

import pytest

from pallas_gpu import arch, errors
from pallas_gpu.arch import Feature


@pytest.mark.parametrize("name", ["sm_90a", "sm_100a"])
def test_a_target_is_found_by_name_and_by_capability(name):
    target = arch.target(name)
    assert target.name == name
    assert arch.target(target) is target
    assert arch.target_of_capability(*target.compute_capability) is target


@pytest.mark.parametrize("name", ["sm_80", "h100", None, 90])
def test_an_unknown_target_is_refused_with_the_known_ones(name):
    with pytest.raises(errors.TargetError) as info:
        arch.target(name)
    assert info.value.expected == "sm_90a or sm_100a"
    assert info.value.got == repr(name)


def test_an_unknown_gpu_is_refused():
    with pytest.raises(errors.TargetError, match="not supported") as info:
        arch.target_of_capability(8, 0)
    assert "9.0 (NVIDIA H200)" in info.value.expected
    assert info.value.hint == "run in the emulator with interpret=True"


@pytest.mark.parametrize(
    ("feature", "owner", "other"),
    [
        (Feature.WGMMA, "sm_90a", "sm_100a"),
        (Feature.TCGEN05, "sm_100a", "sm_90a"),
        (Feature.TMEM, "sm_100a", "sm_90a"),
        (Feature.CLUSTER_LAUNCH_CONTROL, "sm_100a", "sm_90a"),
    ],
)
def test_a_missing_feature_names_the_targets_that_have_it(feature, owner, other):
    arch.target(owner).require(feature, "the step")
    with pytest.raises(errors.TargetError) as info:
        arch.target(other).require(feature, "the step")
    error = info.value
    what = f"the step needs {feature.value}, which {other} does not have"
    assert error.what == what
    assert error.expected == f"one of the targets {owner}"
    assert error.got.startswith(f"{other} (compute capability ")
    assert error.hint


@pytest.mark.parametrize("feature", [Feature.TMA, Feature.MBARRIER_TX, Feature.CLUSTER])
def test_both_targets_copy_asynchronously(feature):
    assert all(target.has(feature) for target in arch.TARGETS.values())


@pytest.mark.parametrize("target", arch.TARGETS.values(), ids=arch.TARGETS)
def test_limits_agree_with_each_other(target):
    # The static variable of a launch takes 16 bytes.
    assert target.smem_bytes_per_block == target.smem_bytes_per_sm - 1024 - 16
    assert (target.tmem_columns > 0) == target.has(Feature.TMEM)
    assert target.max_threads_per_block <= target.max_threads_per_sm
