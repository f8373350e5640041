# SPDX-License-Identifier: Apache-2.0
"""Correct kernels, and mutants of them: the emulator reports every mistake.

Each mutant gives the error, and the lines, that its kernel's table names; one whose
mistake is of arithmetic alone gives a wrong result, the same in every schedule.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
from typing import Any

import jax
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import tiers
from tests.support.lockstep import kernels as in_lockstep
from tests.support.mutations.mutant import Launch, Mutant, Subject, Switches, Wrong
from tests.support.mutations.subjects import SUBJECTS
from tests.support.semantics import BOTH

KINDS = {
    *("waits", "arrivals", "commits", "fences", "counts", "slots", "phases", "offsets"),
    *("axes", "initialisation", "divergence", "two writers", "bounds"),
}
SEEDS = range(2)
MUTANTS = [(subject, mutant) for subject in SUBJECTS for mutant in subject.mutants]


def ids(value: Any) -> str:
    return value.name.replace(" ", "-")


def run(launch: Launch, **params: Any) -> bool:
    """Whether the results are those expected."""
    interpret = plgpu.InterpretParams(**params)
    return is_right(launch, launch.call(interpret)(*launch.arguments))


def is_right(launch: Launch, results: Any) -> bool:
    leaves = jax.tree.leaves(results)
    pairs = zip(leaves, jax.tree.leaves(launch.expected), strict=True)
    return all(
        np.allclose(x, y, rtol=0, atol=launch.tolerance, equal_nan=False)
        for x, y in pairs
    )


def check_report(subject: Subject, mutant: Mutant, seed: int) -> None:
    launch = subject.make(Switches(mutant.name))
    try:
        right = run(launch, seed=seed)
    except plgpu.errors.PallasGpuError as error:
        text = str(error)
        fitting = [
            report
            for report in mutant.reports
            if type(error) is report.error
            and all(f"{subject.line(mark)} " in text for mark in report.marks)
        ]
        assert fitting, f"not as the table says:\n{text}"
        return
    assert not right, "no report, and the result is right"
    assert [r.error for r in mutant.reports] == [Wrong], "no report, a wrong result"


@pytest.mark.parametrize(("subject", "mutant"), MUTANTS, ids=ids)
def test_a_mistake_is_reported_with_its_line(subject, mutant):
    for seed in SEEDS if tiers.runs_everything() else SEEDS[:1]:
        check_report(subject, mutant, seed)


SCHEDULES = [
    {"seed": seed, "asynchrony": asynchrony}
    for seed, asynchrony in itertools.product(range(3), ("random", "eager", "late"))
]


@pytest.mark.parametrize("subject", SUBJECTS, ids=ids)
def test_a_correct_kernel_raises_no_alarm(subject):
    launch = subject.make(Switches())
    assert all(run(launch, **schedule) for schedule in SCHEDULES)


@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("subject", SUBJECTS, ids=ids)
def test_a_correct_kernel_is_correct_as_emitted(subject, semantics):
    launch = subject.make(Switches())
    results = in_lockstep.run(launch.call(None), launch.arguments, semantics)
    assert is_right(launch, results)


@pytest.mark.parametrize(
    ("subject", "variant"), [(s, v) for s in SUBJECTS for v in s.variants]
)
def test_a_variant_that_is_correct_raises_no_alarm(subject, variant):
    launch = subject.make(Switches(variant))
    assert all(run(launch, **schedule) for schedule in SCHEDULES)


@pytest.mark.parametrize("subject", SUBJECTS, ids=ids)
def test_each_switch_of_a_kernel_has_a_row(subject):
    """Some are asked for in a branch that another one switches on."""
    asked: set[str] = set()
    for chosen in (None, *(m.name for m in subject.mutants), *subject.variants):
        switches = Switches(chosen)
        launch = subject.make(switches)
        with contextlib.suppress(plgpu.errors.PallasGpuError):
            jax.eval_shape(launch.call(None), *launch.arguments)
        assert chosen is None or chosen in switches.asked
        asked |= switches.asked
    assert asked == {*(m.name for m in subject.mutants), *subject.variants}


def test_every_class_of_mistakes_is_there():
    kinds = collections.Counter(mutant.kind for _, mutant in MUTANTS)
    assert set(kinds) == KINDS
    assert len(SUBJECTS) >= 10
    assert len(MUTANTS) >= 100
