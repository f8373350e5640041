# SPDX-License-Identifier: Apache-2.0
"""CompilerParams and InterpretParams."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from jax.experimental.pallas import mosaic_gpu as upstream

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


def test_parameters_with_other_fields():
    params = plgpu.CompilerParams(approx_math=True).replace(target="sm_100a")
    assert params == plgpu.CompilerParams(approx_math=True, target="sm_100a")


@refused
def test_other_fields_are_those_of_the_parameters():
    plgpu.CompilerParams().replace(num_warps=2)  # HERE


INTERPRET = plgpu.InterpretParams


@pytest.mark.parametrize(
    ("params", "field", "value", "default"),
    [
        (INTERPRET, "out_of_bounds_reads", "sometimes", "raise"),
        (INTERPRET, "uninitialized_memory", "sometimes", "nan"),
        (INTERPRET, "asynchrony", "sometimes", "random"),
        (INTERPRET, "max_steps", 0, INTERPRET().max_steps),
        (INTERPRET, "schedules", 0, 1),
        (INTERPRET, "num_cores_or_threads", 0, 1),
        (INTERPRET, "num_tma_threads_per_device", 0, 5),
        (INTERPRET, "logging_mode", "barrier", None),
        (INTERPRET, "inline_mgpu", "skip", "error"),
        (plgpu.CompilerParams, "reduction_scratch_bytes", -1, None),
    ],
)
@refused
def test_a_parameter_is_one_of_its_choices(params, field, value, default):
    assert getattr(params(), field) == default
    params(**{field: value})  # HERE


def test_the_parameters_of_upstream_are_taken_with_its_defaults():
    theirs = upstream.InterpretGPUParams()
    values = {f.name: getattr(theirs, f.name) for f in dataclasses.fields(theirs)}
    taken = plgpu.InterpretGPUParams(**values)
    assert {name for name, x in values.items() if x != getattr(INTERPRET(), name)} == {
        "detect_races"
    }
    assert hash(taken) == hash(dataclasses.replace(taken))


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
