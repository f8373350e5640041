# SPDX-License-Identifier: Apache-2.0
"""CompilerParams and InterpretParams."""

from __future__ import annotations

import pickle

import pytest

import pallas_gpu as plgpu
from tests.support.refusal import refused


def test_parameters_are_keys_of_caches():
    assert plgpu.CompilerParams(dimension_semantics=["parallel"]) == (
        plgpu.CompilerParams(dimension_semantics=("parallel",))
    )
    assert hash(plgpu.CompilerParams()) == hash(plgpu.CompilerParams())
    assert plgpu.InterpretParams(seed=1) != plgpu.InterpretParams()


def test_the_name_that_upstream_has_is_the_same_class():
    assert plgpu.InterpretGPUParams is plgpu.InterpretParams


def test_parameters_cross_processes():
    params = plgpu.CompilerParams(approx_math=True, target="sm_100a")
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", None])
def test_targets(target):
    assert plgpu.CompilerParams(target=target).target == target


@refused
def test_scratch_for_reductions_is_not_negative():
    plgpu.CompilerParams(reduction_scratch_bytes=-1)  # HERE


@pytest.mark.parametrize(
    ("field", "default"),
    [
        ("out_of_bounds_reads", "raise"),
        ("uninitialized_memory", "nan"),
        ("asynchrony", "random"),
    ],
)
@refused
def test_choices_of_the_emulator(field, default):
    assert getattr(plgpu.InterpretParams(), field) == default
    plgpu.InterpretParams(**{field: "sometimes"})  # HERE


@refused
def test_the_step_budget_is_positive():
    plgpu.InterpretParams(max_steps=0)  # HERE


@refused
def test_the_number_of_schedules_is_positive():
    plgpu.InterpretParams(schedules=0)  # HERE


def test_schedules_have_consecutive_seeds_and_each_asynchrony_in_turn():
    each = plgpu.InterpretParams(seed=5, schedules=4).each_schedule()
    assert [str(p) for p in each] == [
        "InterpretParams(seed=5)",
        "InterpretParams(seed=6, asynchrony='late')",
        "InterpretParams(seed=7, asynchrony='eager')",
        "InterpretParams(seed=8)",
    ]
    late = plgpu.InterpretParams(asynchrony="late", schedules=2).each_schedule()
    assert [p.asynchrony for p in late] == ["late", "late"]
