# SPDX-License-Identifier: Apache-2.0
"""Kernels whose devices access each other's memory, and mutants of them."""

from __future__ import annotations

import collections

import pytest

import pallas_gpu as plgpu
from tests.mutations import test_mutants
from tests.mutations.test_mutants import check_report, ids, is_right, run
from tests.support import tiers
from tests.support.mutations.devices import SUBJECTS
from tests.support.mutations.mutant import Switches
from tests.support.semantics import BOTH, under

KINDS = {
    *("waits", "peers", "offsets", "signals", "counts", "commits", "two writers"),
    *("fences", "slots", "arithmetic"),
}
MUTANTS = [(subject, mutant) for subject in SUBJECTS for mutant in subject.mutants]
CORRECT = [(s, variant) for s in SUBJECTS for variant in (None, *s.variants)]
SCHEDULES = [
    {"seed": seed, "asynchrony": ("random", "eager", "late")[seed % 3]}
    for seed in range(20)
]


@pytest.mark.parametrize(("subject", "mutant"), MUTANTS, ids=ids)
def test_a_mistake_is_reported_with_its_line(subject, mutant):
    for seed in range(3 if tiers.runs_everything() else 1):
        check_report(subject, mutant, seed)


@pytest.mark.parametrize(("subject", "variant"), CORRECT)
def test_a_correct_kernel_raises_no_alarm(subject, variant):
    launch = subject.make(Switches(variant))
    schedules = SCHEDULES if tiers.runs_everything() else SCHEDULES[:5]
    assert all(run(launch, **schedule) for schedule in schedules)


@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("subject", SUBJECTS, ids=ids)
def test_a_correct_kernel_is_correct_as_emitted(subject, semantics):
    launch = subject.make(Switches())
    run = plgpu.emulate_mesh(under(semantics, launch.on_devices("emitted")))
    assert is_right(launch, run(*launch.arguments))


# Counts that the order of one run hides, and the ends of copies: as emitted, semaphores
# may have any value at the end, and nothing is known of copies in flight then.
UNSEEN_AS_EMITTED = {
    *("the last signal twice", "the first signal is enough", "a second signal"),
    *("one too few", "a wait for the reads", "signals before the copies"),
}


@pytest.mark.parametrize("subject", SUBJECTS, ids=ids)
def test_mistakes_are_seen_as_emitted(subject):
    for mutant in subject.mutants:
        launch = subject.make(Switches(mutant.name))
        run = plgpu.emulate_mesh(launch.on_devices("emitted"))
        try:
            seen = not is_right(launch, run(*launch.arguments))
        except plgpu.errors.PallasGpuError:
            seen = True
        assert seen is (mutant.name not in UNSEEN_AS_EMITTED), mutant.name


@pytest.mark.parametrize("subject", SUBJECTS, ids=ids)
def test_each_switch_of_a_kernel_has_a_row(subject):
    test_mutants.test_each_switch_of_a_kernel_has_a_row(subject)


def test_every_class_of_mistakes_is_there():
    kinds = collections.Counter(mutant.kind for _, mutant in MUTANTS)
    assert set(kinds) == KINDS
    assert len(MUTANTS) >= 40
