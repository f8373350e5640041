# SPDX-License-Identifier: Apache-2.0
"""Composites: what replaces an operation, where, and what must not change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import pallas_gpu as plgpu
from pallas_gpu import arch, errors
from pallas_gpu.entry import expand
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.walk import walk
from tests.support import everywhere

TARGET = arch.target("sm_90a")


def body_of(function, *args):
    """The traced body of the only kernel that a function calls."""
    (eqn,) = [e for e in jax.make_jaxpr(function)(*args).eqns if "mesh" in e.params]
    return eqn.params["jaxpr"], eqn.params["mesh"]


def kernel(body):
    return everywhere.kernel(body, jax.ShapeDtypeStruct((64, 128), jnp.float32))


def names(jaxpr):
    return [site.eqn.primitive.name for site in walk(jaxpr)]


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

    jaxpr, mesh = body_of(kernel(body)(None), np.zeros((64, 128), np.float32))
    semantics = plgpu.LoweringSemantics.Lane
    assert expand.expanded_body(jaxpr, mesh, TARGET, semantics) is jaxpr


def test_an_expanded_body_has_no_composites():
    jaxpr, mesh = body_of(kernel(in_a_loop)(None), np.zeros((64, 128), np.float32))
    lowered = {p.name for p in registry.rules(registry.RuleKind.WARPGROUP)}
    semantics = plgpu.LoweringSemantics.Warpgroup
    done = expand.expanded_body(jaxpr, mesh, TARGET, semantics)
    assert set(names(jaxpr)) - lowered == {"bessel_i1e"}
    assert set(names(done)) <= lowered
    assert expand.expanded_body(jaxpr, mesh, TARGET, semantics) is done


@pytest.fixture
def wrong_rule(monkeypatch):
    """A composite whose rule a test provides."""
    rules = registry.rules(registry.RuleKind.COMPOSITE)

    def replace(rule):
        monkeypatch.setitem(rules, jax.lax.bessel_i1e_p, rule)

    return replace


def test_a_rule_that_gives_another_type_is_our_error(wrong_rule):
    wrong_rule(lambda composite, x: x.astype(jnp.bfloat16))
    with pytest.raises(errors.InternalError, match="gives another type"):
        kernel(in_a_loop)(plgpu.InterpretParams())(np.zeros((64, 128), np.float32))


def test_a_rule_that_closes_over_an_array_is_our_error(wrong_rule):
    table = np.arange(128, dtype=np.float32)
    wrong_rule(lambda composite, x: x + jnp.asarray(table))
    with pytest.raises(errors.InternalError, match="closes over an array"):
        kernel(in_a_loop)(plgpu.InterpretParams())(np.zeros((64, 128), np.float32))


def test_scratch_of_a_rule_counts_against_the_budget(wrong_rule):
    def rule(composite, x):
        def with_scratch(big):
            return x

        return plgpu.run_scoped(with_scratch, plgpu.SMEM((1024, 1024), jnp.float32))

    wrong_rule(rule)
    with pytest.raises(errors.OutOfResources, match="1024"):
        kernel(in_a_loop)(plgpu.InterpretParams())(np.zeros((64, 128), np.float32))


def test_an_error_in_what_a_rule_uses_has_the_kernels_line(wrong_rule):
    wrong_rule(lambda composite, x: jax.pure_callback(np.sin, x, x))
    with pytest.raises(errors.UnsupportedError, match=r"test_expand.py:\d+"):
        kernel(in_a_loop)(plgpu.InterpretParams())(np.zeros((64, 128), np.float32))
