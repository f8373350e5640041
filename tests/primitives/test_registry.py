# SPDX-License-Identifier: Apache-2.0
"""What `define` says of an operation: refused where it contradicts itself, and used."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import types
from pallas_gpu.entry import trace
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program.walk import walk
from tests.support.refusal import refused


@pytest.fixture
def define(monkeypatch):
    """`define`, into a registry of its own."""
    monkeypatch.setattr(registry, "_OPERATIONS", dict(registry._OPERATIONS))
    monkeypatch.setitem(registry.MACHINES, registry.GPU, dict(registry.PRIMITIVES))
    return registry.define


MISTAKES = {
    "an operand twice": lambda define: define("probe", "tma", reads=("src", "src")),
    "a string": lambda define: define("probe", "tma", reads="src"),
    "asynchronous": lambda define: define("probe", "tma", asynchronous=True),
    "atomic": lambda define: define("probe", "tma", atomic=True, reads=("src",)),
    "a family that is no stem": lambda define: define("probe", "two words"),
    "a name twice": lambda define: [define("probe", "tma") for _ in range(2)],
    "a primitive of jax twice": lambda _: registry.describe(
        registry.JAX_PRIMITIVES["get"].primitive, "elementwise"
    ),
    "two checks": lambda _: registry.checks(registry.PRIMITIVES["load"].primitive)(
        print
    ),
    "another operand": lambda define: ops.bind(
        define("probe", "tma", reads=("src",)), {"source": jnp.zeros(())}
    ),
    "a reference that is neither read nor written": lambda define: ops.bind(
        define("probe", "tma", reads=("src",)),
        {"src": jnp.zeros(()), "dst": ops.RefOperand(jnp.zeros(()))},
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@refused
def test_what_contradicts_itself_is_refused(define, mistake):
    MISTAKES[mistake](define)


def test_only_an_operation_that_computes_its_result_and_no_more_can_be_dropped():
    effects = {
        name: bool(op.equation.effects)
        for name, op in operations(copies).items()
        if name in registry.PRIMITIVES
    }
    assert effects.pop("layout_cast") is False
    assert all(effects.values())


def copies(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x, tile, barrier)
    plgpu.barrier_wait(barrier)
    value = plgpu.layout_cast(plgpu.load(tile), plgpu.Layout.WG_STRIDED((64, 64), 2))
    o[...] = value
    plgpu.barrier_arrive(barrier)
    plgpu.copy_smem_to_gmem(tile, o)
    plgpu.wait_smem_to_gmem(0)


def operations(body):
    """The operations of a body, by their names."""

    def whole(x, o):
        plgpu.run_scoped(
            lambda tile, barrier: body(x, o, tile, barrier),
            plgpu.SMEM((64, 64), jnp.float32),
            plgpu.Barrier(),
        )

    aval = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    traced, _ = trace.trace_body(
        whole, trace.Arrays.of([aval], [aval]), types.Mesh(), "k"
    )
    return {site.op.name: site.op for site in walk(traced.jaxpr)}


def test_accesses_tell_the_memory_of_each_operand():
    found = {
        name: [(a.name, a.space, a.reads, a.writes) for a in op.accesses]
        for name, op in operations(copies).items()
    }
    barriers = types.BARRIERS
    assert found["copy_gmem_to_smem"] == [
        ("src", types.GMEM, True, False),
        ("dst", types.SMEM, False, True),
        ("barrier", barriers, False, True),
    ]
    assert found["barrier_wait"] == [("barrier", barriers, True, False)]
    assert found["swap"] == [("ref", types.GMEM, True, True)]
    assert found["load"] == [("src", types.SMEM, True, False)]
    assert found["layout_cast"] == found["run_scoped"] == []
