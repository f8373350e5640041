# SPDX-License-Identifier: Apache-2.0
"""Values of several registers, masks that loops carry, branches, logs, refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gpu import errors
from pallas_gpu import sparsecore as plsc
from tests.support.sparsecore import emitted, interpreter
from tests.support.sparsecore.kernels import check, kernel

X = np.arange(128, dtype=np.float32) - 40
V = plsc.VMEM((128,), jnp.float32)
M = plsc.SMEM((128,), jnp.float32)


def _whole(x):
    x = x * 2 + jnp.sum(x)
    return jnp.concatenate([jnp.cumsum(x[:64]), jnp.flip(x[64:])])


def _halves(x):
    low, high = jnp.split(x, 2)
    return jnp.stack([high, low]).reshape(128)


def _until_none(x):
    def step(carry):
        return carry[0] + 1, carry[1] - 8.0

    n, rest = lax.while_loop(lambda c: jnp.any(c[1] > 0), step, (0, x))
    return rest + n


def _carried_mask(x):
    def both(i, mask):
        return mask & (x > i.astype(jnp.float32))

    return jnp.where(lax.fori_loop(0, 9, both, x < 50), x, 0)


def _chosen(x):
    branches = [lambda: x, lambda: x * 2, lambda: x + 1]
    return lax.switch(jnp.argmax(x[:16]) - 14, branches)


def _steps_that_are_left(x):
    return lax.fori_loop(0, 10, lambda i, y: y * 2 - i, x, unroll=4)


def _of_scalars(x):
    return x + jnp.exp(x[41]) / (1 + x[43])


def _one_of_a_mask(x):
    return jnp.where((x > 0)[41], x, -x)


_BODIES = {f.__name__: f for f in (_whole, _halves, _until_none, _carried_mask)}
_BODIES |= {
    f.__name__: f for f in (_chosen, _of_scalars, _steps_that_are_left, _one_of_a_mask)
}


def _through(function):
    def body(x_ref, o_ref, v):
        plsc.sync_copy(x_ref, v)
        v[...] = function(v[...])
        plsc.sync_copy(v, o_ref)

    return body


@pytest.mark.parametrize("name", _BODIES)
def test_values_of_many_registers_are_computed(name):
    function = _BODIES[name]
    expected = np.asarray(function(jnp.asarray(X)))
    check(_through(function), [X], expected, V, subcores=1, rtol=1e-5)


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda x: lax.fori_loop(0, 5, lambda i, y: y + x, x), lambda x: x * 6),
        (
            lambda x: lax.select_n(x.astype(jnp.int32) % 3, x, x + 1, x - 1),
            lambda x: np.choose(x % 3, [x, x + 1, x - 1]),
        ),
    ],
    ids=["a loop that adds one vector", "cases that words number"],
)
def test_values_of_16_bits(function, expected):
    x = np.arange(32, dtype=np.int16) * 1021 & 0x7FF
    own = plsc.VMEM((32,), jnp.int16)
    check(_through(function), [x], expected(x), own, subcores=1, tiling="sparsecore")


def _logged(body, *scratch, **options):
    build = emitted.lowered(kernel(body, X, *scratch, **options), X)
    return interpreter.run(build.module, X)[1]


def test_a_log_has_the_text_in_front_of_the_value():
    def body(x_ref, o_ref, v):
        plsc.sync_copy(x_ref, v)
        plsc.debug_print("subcore {}", lax.axis_index("s"))
        jax.debug.print("v: {}", v[:16])
        plsc.sync_copy(v, o_ref)

    log = _logged(body, V, subcores=1)
    assert [(tag, np.size(values[0])) for _, tag, values in log] == [
        ("subcore", 1),
        ("v:", 16),
    ]


_LOGGED = {
    "vmem": (V, {}, lambda v: v),
    "rows": (plsc.VMEM((16, 128), jnp.float32), {}, lambda v: v.at[3]),
    "part": (V, {}, lambda v: v.at[16:32]),
    "narrow": (plsc.VMEM((256,), jnp.bfloat16), {}, lambda v: v),
    "smem": (M, {"scalar": True}, lambda m: m),
    "element": (M, {"scalar": True}, lambda m: m.at[7]),
    "columns": (plsc.VMEM((4, 256), jnp.float32), {}, lambda v: v.at[1:3, 128:]),
    "shared": (plsc.VMEM_SHARED((128,), jnp.float32), {}, lambda v: v),
}


@pytest.mark.parametrize("case", _LOGGED)
def test_a_reference_is_logged(case, capsys):
    scratch, options, chosen = _LOGGED[case]

    def body(x_ref, o_ref, ref):
        plsc.sync_copy(x_ref, ref)
        plsc.debug_print("ref: {}", chosen(ref))
        plsc.sync_copy(ref, o_ref)

    x = np.arange(np.prod(scratch.shape)).reshape(scratch.shape).astype(scratch.dtype)
    options |= {} if "scalar" in options else {"subcores": 1}
    ((_, tag, (shown,)),) = interpreter.run(
        emitted.lowered(kernel(body, x, scratch, **options), x).module, x
    )[1]
    assert tag == "ref:"
    check(body, [x], x, scratch, schedules=1, interpret=False, **options)
    lines = capsys.readouterr().out.splitlines()
    printed = [float(line.split(":")[-1]) for line in lines]
    np.testing.assert_array_equal(printed[: shown.size], np.ravel(shown).astype(float))


def test_a_delay_changes_nothing():
    def body(x_ref, o_ref, v):
        plsc.sync_copy(x_ref, v)
        plsc.delay(10)
        plsc.sync_copy(v, o_ref)

    check(body, [X], X, V)


@pytest.mark.parametrize("operation", [jnp.exp, lambda x: 1 / x])
def test_a_scalar_subcore_has_no_such_operation(operation):
    def body(x_ref, o_ref, m):
        plsc.sync_copy(x_ref, m)
        m[1] = operation(m[0])
        plsc.sync_copy(m, o_ref)

    with pytest.raises(errors.UnsupportedError, match="on a scalar subcore"):
        _logged(body, M, scalar=True)


@pytest.mark.parametrize("dtype", [jnp.int16, jnp.bfloat16])
def test_smem_has_words(dtype):
    def body(x_ref, o_ref, m):
        plsc.sync_copy(x_ref, m)
        m[1] = m[0]
        plsc.sync_copy(m, o_ref)

    x = np.zeros(32, dtype)
    scratch = plsc.SMEM((32,), dtype)
    with pytest.raises(errors.UnsupportedError, match="in SMEM"):
        emitted.lowered(kernel(body, x, scratch, scalar=True), x)


def test_an_argument_that_is_a_scalar_is_refused():
    def body(x_ref, y_ref, o_ref, v):
        plsc.sync_copy(x_ref, v)
        plsc.sync_copy(v, o_ref)

    with pytest.raises(errors.ShapeError, match="is a scalar"):
        emitted.lowered(kernel(body, X, V), X, np.float32(3))
