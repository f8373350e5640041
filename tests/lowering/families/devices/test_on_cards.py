# SPDX-License-Identifier: Apache-2.0
"""Kernels of several devices on all GPUs of a machine, in a process of their own."""

import os
import subprocess
import sys

import jax
import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("module", ["programs", "card", "stress"])
def test_kernels_reach_other_cards(module):
    if len(jax.devices("cuda")) < 2:
        pytest.skip("needs two GPUs")
    ended = subprocess.run(
        [sys.executable, "-m", f"tests.support.devices.{module}"],
        env={**os.environ, "JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
