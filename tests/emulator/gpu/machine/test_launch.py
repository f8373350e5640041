# SPDX-License-Identifier: Apache-2.0
"""Launches on devices: CTAs that wait for one another, and more than one device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import arch
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.waits import Wait
from pallas_gpu.emulator.gpu.machine.device import Machine
from pallas_gpu.emulator.gpu.machine.launch import Launch
from pallas_gpu.entry import call
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import tma
from tests.support import everywhere
from tests.support.entry_kernels import f32
from tests.support.refusal import refused

F32 = jnp.float32
# 200 KB: an SM holds one CTA.
LARGE = plgpu.SMEM((50_000,), F32)


@pytest.fixture
def all_ctas_meet(monkeypatch):
    """Makes `commit_smem` a barrier of all warpgroups of a run.

    CTAs of different devices have no other one; those of one device wait for another
    in tests/emulator/gpu/sync/test_semaphore.py, too. The fixture is a function of the
    number of warpgroups.
    """

    def install(count):
        arrived = []
        known: ordering.Clock = {}

        def meet(wg, *_, **__):
            arrived.append(wg)
            ordering.join(known, wg.release())
            yield Wait(
                lambda: len(arrived) == count,
                "all CTAs",
                lambda: f"{len(arrived)} of {count} have come",
                across_groups=True,
            )
            ordering.join(wg.clock, known)

        rules = registry.rules(registry.RuleKind.EMULATE)
        monkeypatch.setitem(rules, tma.commit_smem_p, meet)

    return install


def neighbours(n, **options):
    """A kernel of n CTAs: each writes its number and, later, reads the next one's."""

    def body(mine, next_one, *_):
        i = lax.axis_index("i")
        if options.get("cluster"):
            i = 2 * i + lax.axis_index("x")
        mine[i] = i.astype(F32)
        plgpu.commit_smem()
        next_one[i] = mine[lax.rem(i + 1, n)]

    options.setdefault("grid", (n,))
    options.setdefault("scratch_types", [LARGE])
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((n,), F32)] * 2,
        grid_names=("i",),
        interpret=plgpu.InterpretParams(detect_races=True),
        **options,
    )


def launch(kernel, device, *args):
    """The launch of a kernel on a device of the test's own."""
    (eqn,) = jax.make_jaxpr(kernel)(*args).eqns
    return Launch(call.CallParams(**eqn.params), device, args)


def small(sm_count):
    return dataclasses.replace(arch.SM_90A, gpc_sms=(sm_count,))


def test_clusters_can_wait_for_one_another(all_ctas_meet):
    all_ctas_meet(132)
    run = neighbours(132, grid=(66,), cluster=(2,), cluster_names=("x",))
    np.testing.assert_array_equal(run()[1], np.roll(np.arange(132), -1))


def test_ctas_share_an_sm_where_their_smem_allows_it(all_ctas_meet):
    all_ctas_meet(140)
    _, got = neighbours(140, scratch_types=[])()
    np.testing.assert_array_equal(got, np.roll(np.arange(140), -1))


@refused
def test_a_cluster_too_many_deadlocks_and_the_report_counts_clusters(all_ctas_meet):
    all_ctas_meet(6)
    machine = Machine(plgpu.InterpretParams(), small(5))
    kernel = neighbours(6, grid=(3,), cluster=(2,), cluster_names=("x",))
    machine.run([launch(kernel, machine.devices[0]).pool()])


def test_ctas_that_do_not_wait_run_on_one_sm():
    machine = Machine(plgpu.InterpretParams(), small(1))

    def body(o):
        i = lax.axis_index("i")
        o[i] = i.astype(F32)

    run = everywhere.kernel(body, f32(20), grid={"i": 20})()
    one = launch(run, machine.devices[0])
    machine.run([one.pool()])
    np.testing.assert_array_equal(one.outputs[0].data, np.arange(20))
    assert not machine.execution.resident


# --- devices --------------------------------------------------------------------------


def test_two_devices_have_separate_memories():
    machine = Machine(plgpu.InterpretParams(), arch.SM_90A, devices=2)
    kernel = everywhere.kernel(lambda x, o: o.set(x[...] * 2), f32(4))()
    xs = [np.full(4, value, np.float32) for value in (1, 5)]
    launches = [launch(kernel, d, x) for d, x in zip(machine.devices, xs, strict=True)]
    machine.run([one.pool() for one in launches])
    for x, one in zip(xs, launches, strict=True):
        np.testing.assert_array_equal(one.outputs[0].data, x * 2)
    first, second = (one._inputs + one.outputs for one in launches)
    assert len(first) == len(second) == 2
    assert not any(np.shares_memory(a.data, b.data) for a in first for b in second)


def test_ctas_of_two_devices_run_at_once(all_ctas_meet):
    all_ctas_meet(8)
    machine = Machine(plgpu.InterpretParams(), small(4), devices=2)
    launches = [launch(neighbours(4), device) for device in machine.devices]
    machine.run([one.pool() for one in launches])
    for one in launches:
        np.testing.assert_array_equal(one.outputs[1].data, [1, 2, 3, 0])


@refused
def test_a_report_names_the_device(all_ctas_meet):
    all_ctas_meet(9)
    machine = Machine(plgpu.InterpretParams(), small(4), devices=2)
    launches = [launch(neighbours(4), device) for device in machine.devices]
    machine.run([one.pool() for one in launches])
