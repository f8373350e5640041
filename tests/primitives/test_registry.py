# SPDX-License-Identifier: Apache-2.0
"""What `define` says of an operation: refused where it contradicts itself, and used."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors, types
from pallas_gpu.entry import trace
from pallas_gpu.primitives import _accesses
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.walk import walk


@pytest.fixture
def define(monkeypatch):
    """`define`, into a registry of its own."""
    for name in ("PRIMITIVES", "_OPERATIONS"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    return registry.define


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"issuers": ("thread",)}, "invalid issuers"),
        ({"issuers": ()}, "invalid issuers"),
        ({"reads": ("src", "src")}, "not a list of operands"),
        ({"reads": "src"}, "not a list of operands"),
        ({"asynchronous": True}, "accesses nothing"),
        ({"atomic": True, "reads": ("src",)}, "it is atomic and writes nothing"),
    ],
    ids=["scope", "no scope", "twice", "a string", "asynchronous", "atomic"],
)
def test_facts_that_contradict_each_other_are_refused(define, facts, message):
    with pytest.raises(errors.InternalError, match=f"define probe: .*{message}"):
        define("probe", "tma", **facts)


def test_a_family_is_the_stem_of_a_file(define):
    with pytest.raises(errors.InternalError, match="its family is not a module's name"):
        define("probe", "two words")


def test_a_name_is_defined_once(define):
    define("probe", "tma")
    with pytest.raises(errors.InternalError, match="probe is defined twice"):
        define("probe", "tma")


def test_a_primitive_of_jax_is_described_once():
    known = next(iter(registry.JAX_PRIMITIVES.values()))
    with pytest.raises(errors.InternalError, match="is described twice"):
        registry.describe(known.primitive, "elementwise")


def test_a_primitive_is_checked_by_one_function():
    with pytest.raises(errors.InternalError, match="two checks for the primitive load"):
        registry.checks(registry.PRIMITIVES["load"].primitive)(print)


def operands(**named):
    return {name: jnp.zeros(()) if x is None else x for name, x in named.items()}


def test_an_access_names_an_operand(define):
    probe = define("probe", "tma", reads=("src",))
    with pytest.raises(errors.InternalError, match="operands that it does not have"):
        ops.bind(probe, operands(source=None))


def test_a_reference_is_read_or_written(define):
    probe = define("probe", "tma", reads=("src",))
    ref = ops.RefOperand(jnp.zeros(()))
    with pytest.raises(errors.InternalError, match="neither reads nor writes"):
        ops.bind(probe, operands(src=None, dst=ref))


def test_only_an_operation_that_computes_its_result_and_no_more_can_be_dropped():
    effects = {
        name: bool(eqn.effects)
        for name, eqn in equations(copies).items()
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


def equations(body):
    """The equations of a body, by their names."""

    def whole(x, o):
        plgpu.run_scoped(
            lambda tile, barrier: body(x, o, tile, barrier),
            plgpu.SMEM((64, 64), jnp.float32),
            plgpu.Barrier(),
        )

    aval = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    traced = trace.trace_body(whole, [aval], [aval], types.Mesh(), "k")
    return {site.eqn.primitive.name: site.eqn for site in walk(traced.jaxpr)}


def test_accesses_tell_the_memory_of_each_operand():
    found = {
        name: [(a.name, a.space, a.reads, a.writes) for a in _accesses.accesses(eqn)]
        for name, eqn in equations(copies).items()
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


def test_stores_are_those_of_threads():
    stores = {
        name for name, eqn in equations(copies).items()
        if _accesses.stores_to(eqn, types.GMEM)
    }  # fmt: skip
    assert stores == {"swap"}
