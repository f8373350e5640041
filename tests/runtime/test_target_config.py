# SPDX-License-Identifier: Apache-2.0
"""XLA's description of a target."""

from __future__ import annotations

import pytest

from pallas_gpu import arch, errors
from pallas_gpu.runtime import target_config


@pytest.mark.parametrize("target", arch.TARGETS.values(), ids=lambda t: t.name)
def test_config_states_the_targets_capability_and_limits(target):
    config = target_config.target_config(target)
    major, minor = target.compute_capability
    assert f"cuda_compute_capability {{ major: {major} minor: {minor} }}" in config
    opt_in = target.smem_bytes_per_block + arch.STATIC_SMEM_BYTES
    assert f"shared_memory_per_block_optin: {opt_in}\n" in config
    assert f"core_count: {target.sm_count}\n" in config


def test_config_of_an_unknown_target_is_an_error():
    with pytest.raises(errors.TargetError, match="unknown target"):
        target_config.target_config("sm_80")
