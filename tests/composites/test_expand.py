# SPDX-License-Identifier: Apache-2.0
"""Composites: what replaces an operation, where, and what must not change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import pallas_gpu as plgpu
from pallas_gpu import arch
from pallas_gpu.entry import expand
from pallas_gpu.entry.call import CallParams
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program.bodies import equations
from tests.support import everywhere
from tests.support.refusal import refused

TARGET = arch.target("sm_90a")


def params_of(function, *args):
    """The parameters of the only kernel that a function calls."""
    (eqn,) = [e for e in jax.make_jaxpr(function)(*args).eqns if "mesh" in e.params]
    return CallParams(**eqn.params)


def kernel(body):
    return everywhere.kernel(body, jax.ShapeDtypeStruct((64, 128), jnp.float32))


def names(jaxpr):
    return [eqn.primitive.name for eqn in equations(jaxpr)]


def bessel(x):
    return jax.lax.bessel_i1e(x) * 2


def in_a_loop(x_ref, o_ref):
    o_ref[...] = jax.lax.fori_loop(0, 2, lambda _, x: bessel(x), x_ref[...])


@pytest.mark.smoke
def test_a_composite_in_a_loop_computes_what_jax_computes(rng):
    x = rng.normal(size=(64, 128)).astype(np.float32)
    expected = special.i1e(special.i1e(x.astype(np.float64)) * 2) * 2
    everywhere.check(kernel(in_a_loop), [x], expected, rtol=2e-6)


def test_a_body_without_composites_is_unchanged():
    def body(x_ref, o_ref):
        o_ref[...] = jnp.sin(x_ref[...])

    params = params_of(kernel(body)(None), np.zeros((64, 128), np.float32))
    assert expand.expanded(params, TARGET) is params


def test_an_expanded_body_has_no_composites():
    params = params_of(kernel(in_a_loop)(None), np.zeros((64, 128), np.float32))
    lowered = {p.name for p in registry.rules(registry.RuleKind.EMIT)}
    done = expand.expanded(params, TARGET).jaxpr
    assert set(names(params.jaxpr)) - lowered == {"bessel_i1e"}
    assert set(names(done)) <= lowered
    assert expand.expanded(params, TARGET).jaxpr is done


@pytest.fixture
def wrong_rule(monkeypatch):
    """A composite whose rule a test provides."""
    rules = registry.rules(registry.RuleKind.COMPOSITE)

    def replace(rule):
        monkeypatch.setitem(rules, jax.lax.bessel_i1e_p, rule)

    return replace


def another_type(composite, x):
    return x.astype(jnp.bfloat16)


def closes_over_an_array(composite, x):
    return x + jnp.asarray(np.arange(128, dtype=np.float32))


def large_scratch(composite, x):
    return plgpu.run_scoped(lambda _: x, plgpu.SMEM((1024, 1024), jnp.float32))


def has_no_rule(composite, x):
    return jax.pure_callback(np.sin, x, x)


@pytest.mark.parametrize(
    "rule", [another_type, closes_over_an_array, large_scratch, has_no_rule]
)
@refused
def test_a_wrong_rule(wrong_rule, rule):
    wrong_rule(rule)
    kernel(in_a_loop)(plgpu.InterpretParams())(np.zeros((64, 128), np.float32))
