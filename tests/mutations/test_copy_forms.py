# SPDX-License-Identifier: Apache-2.0
"""Every form of a copy: the emulator reports a wait, a fence, a count left out."""

from __future__ import annotations

import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.mutations import copy_forms
from tests.support.mutations.copy_forms import NAMES, NEEDS, NOT_NEEDED

SEEDS = range(2)


def form(name):
    """Returns a form, and the function that makes its kernel."""
    kind, _, which = name.partition(" ")
    forms = {"load": copy_forms.LOADS, "store": copy_forms.STORES}
    return forms[kind][which], getattr(copy_forms, kind)


def emulate(name, omitted, seed):
    """Returns what the kernel gives, and what it should give."""
    chosen, make = form(name)
    kernel, arguments, expected = make(chosen, omitted)
    return kernel(plgpu.InterpretParams(seed=seed))(*arguments), expected


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_with_all_that_it_needs_is_right(name):
    chosen, make = form(name)
    blackwell = "compiler_params" in chosen.options
    everywhere.check(*make(chosen, None), on_gpu=not blackwell)


@pytest.mark.parametrize(("name", "omitted"), NEEDS)
def test_what_a_copy_needs_is_not_left_out(name, omitted):
    stuck = omitted == "count" and name.startswith("load")
    error = errors.DeadlockError if stuck else errors.RaceError
    for seed in SEEDS:
        with pytest.raises(error) as caught:
            emulate(name, omitted, seed)
        assert "copy_forms.py" in caught.value.where


@pytest.mark.parametrize(("name", "omitted"), sorted(NOT_NEEDED))
def test_what_a_copy_does_not_need_may_be_left_out(name, omitted):
    for seed in SEEDS:
        np.testing.assert_array_equal(*emulate(name, omitted, seed))
