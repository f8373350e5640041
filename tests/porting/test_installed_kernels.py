# SPDX-License-Identifier: Apache-2.0
"""The kernels that JAX installs for GPUs, with their import lines changed."""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import arch, errors
from tests.support import installed_cases
from tests.support import installed_kernels as installed
from tests.support.differential import sides
from tests.support.everywhere import has_gpu
from tests.support.installed_cases import CASES, wide
from tests.support.installed_kernels import ported
from tests.support.lockstep import kernels as in_lockstep
from tests.support.semantics import BOTH, Lane, Traced, under

pytestmark = pytest.mark.skipif(
    not jax.__version__.startswith("0.11."), reason="kernels of upstream 0.11"
)
# Without reports of what the kernels leave to the speed of the hardware.
LIKE_UPSTREAM = plgpu.InterpretParams(
    like_upstream=True, detect_races=False, asynchrony="eager"
)
each = pytest.mark.parametrize("name", CASES)


def check(case, params):
    """Compares the results of a case in the emulator, or on a GPU without `params`."""
    function, args, expected = case.make()
    if params is None:
        with jax.default_device(jax.devices("cuda")[0]):
            got = jax.jit(function)(*args)
        assert {x.platform for x in jax.tree.leaves(got)[0].devices()} == {"gpu"}
    else:
        with plgpu.force_gpu_interpret_mode(params):
            got = function(*args)
    close(got, expected, case.error)


def close(got, expected, error):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(wide(a), wide(b), rtol=error, atol=error)


@each
def test_it_runs_in_the_emulator(name):
    case = CASES[name]
    if case.alarm is not None:
        with pytest.raises(Exception, match=case.alarm):
            check(case, plgpu.InterpretParams())
    check(case, LIKE_UPSTREAM if case.alarm else plgpu.InterpretParams())


FIRST = [name for name in CASES if name.endswith(" 0")]


@pytest.mark.parametrize("name", FIRST)
def test_no_schedule_raises_a_false_alarm(name):
    case = CASES[name]
    relaxed = LIKE_UPSTREAM if case.alarm else plgpu.InterpretParams()
    check(case, dataclasses.replace(relaxed, schedules=20))


@pytest.mark.parametrize("name", [n for n in FIRST if "blackwell_matmul" not in n])
def test_what_is_emitted_runs(name):
    function, args, expected = CASES[name].make()
    close(in_lockstep.lower(function, args).run(), expected, CASES[name].error)


@each
def test_it_is_lowered_under_both_semantics(name):
    case = CASES[name]
    function, args, _ = case.make()
    traced = Traced(function, args)
    for semantics in BOTH:
        lower = functools.partial(
            plgpu.offline.lower, traced.under(semantics), *args, target=case.target
        )
        if semantics is Lane and not case.lane:
            with pytest.raises(errors.LayoutError, match=r"tiled|in other threads"):
                lower()
        else:
            assert lower()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].target == "sm_90a"])
def test_it_runs_on_a_gpu(name):
    assert has_gpu()
    check(CASES[name], None)


@pytest.mark.parametrize("name", [n for n in CASES if "blackwell_matmul" in n])
def test_it_lacks_a_wait_for_its_last_copies_and_an_order_of_its_phases(
    name, monkeypatch
):
    waits = "plgpu.wait_smem_to_gmem({}, wait_read_only=True)"
    waiting = ported("blackwell_matmul_mgpu", *(waits.format(n) for n in (1, 0)))
    monkeypatch.setattr(installed_cases, "ported", lambda _: waiting)
    case = CASES[name]
    if case.options["tile"][-1] and case.options["tiles"] > 1:
        with pytest.raises(errors.BarrierError, match="a wait can miss its phase"):
            check(case, plgpu.InterpretParams(schedules=8))
    else:
        check(case, plgpu.InterpretParams())


# Those that compute and move; fences and waits are as many as each package needs.
_TCGEN05 = re.compile(r"tcgen05\.(?!fence|wait)[\w.:]+")


@pytest.mark.offline
@pytest.mark.parametrize("collective", [False, True])
def test_blackwell_matmul_has_the_instructions_of_upstreams(collective):
    there = importlib.import_module(f"{installed.PLACE}.blackwell_matmul_mgpu")
    here = ported("blackwell_matmul_mgpu")

    def product(module):
        config = module.TuningConfig(128, 128, 64, 4, collective=collective)
        return functools.partial(module.matmul_kernel, config=config)

    def instructions(ptx):
        return collections.Counter(_TCGEN05.findall(ptx))

    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    expected = instructions(sides.upstream(arch.SM_100A).ptx(product(there), x, x))
    assert expected[f"tcgen05.mma.cta_group::{1 + collective}.kind::f16"] == 8
    for semantics in BOTH:
        made = under(semantics, product(here))
        (report,) = plgpu.offline.compile(made, x, x, target="sm_100a")
        assert instructions(report.ptx) == expected
        assert report.resources.spill_store_bytes == 0
