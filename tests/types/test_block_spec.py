# SPDX-License-Identifier: Apache-2.0
"""Block specs by themselves; what they do to a call is in entry/test_pallas_call.py."""

from __future__ import annotations

import pytest

import pallas_gpu as plgpu
from tests.support.refusal import refused


@pytest.mark.parametrize(
    ("block", "sizes", "squeezed"),
    [
        (None, (3, 64, 128), (False, False, False)),
        ((None, 32, 128), (1, 32, 128), (True, False, False)),
        ((plgpu.Squeezed(), plgpu.Blocked(8), 128), (1, 8, 128), (True, False, False)),
        ((1, plgpu.Element(8), plgpu.Squeezed), (1, 8, 1), (False, False, True)),
    ],
)
def test_sizes_and_squeezed_dimensions(block, sizes, squeezed):
    spec = plgpu.BlockSpec(block)
    assert spec.sizes((3, 64, 128), "it") == sizes
    assert spec.squeezed(3) == squeezed


def test_lists_become_tuples():
    spec = plgpu.BlockSpec([8, 8], transforms=[plgpu.TilingTransform((8, 8))])
    assert spec.block_shape == (8, 8)
    assert spec.transforms == (plgpu.TilingTransform((8, 8)),)


def test_a_spec_with_other_fields():
    spec = plgpu.BlockSpec((8, 8), delay_release=1, memory_space=plgpu.SMEM)
    other = plgpu.BlockSpec((8, 4), delay_release=1, memory_space=plgpu.SMEM)
    assert spec.replace(block_shape=[8, 4]) == other
    assert "replace" in dir(spec)


@refused
def test_other_fields_are_checked():
    plgpu.BlockSpec((8, 8)).replace(delay_release=-1)  # HERE


@refused
def test_pipelines_of_blocks_are_not_supported():
    plgpu.BlockSpec((8, 8), pipeline_mode=2)  # HERE
