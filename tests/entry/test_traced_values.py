# SPDX-License-Identifier: Apache-2.0
"""What Python needs while a body is traced, and is known only when the kernel runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.entry_kernels import f32, run
from tests.support.refusal import refused, refused_by


def position():
    return lax.axis_index("i")


def first_if_positive(x):
    return x[0] if x[0].sum() > 0 else -x[0]


def rows_in_python(x):
    return sum(x[i] for i in range(position()))


def of_a_list(x):
    return [x[0], x[1]][position()]


MISUSES = {
    "if": first_if_positive,
    "and": lambda x: jnp.where(position() > 0 and position() < 2, x[0], 0),
    "a chain": lambda x: jnp.where(0 <= position() < 2, x[0], 0),
    "range": rows_in_python,
    "a list": of_a_list,
    "numpy": lambda x: np.exp(x[0]),
    "float": lambda x: float(x[0, 0]) * x[0],
    "arange": lambda x: jnp.arange(position()),
    "nonzero": lambda x: jnp.nonzero(x[0])[0],
    "bools": lambda x: x[0][x[0] > 0],
    "slice": lambda x: x[...][position() : position() + 1],
    "shape": lambda x: jnp.zeros((position(), 128)),
}


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES)
@refused_by(run, grid=(1,), grid_names=("i",))
def test_python_says_what_to_write_for_a_value_that_only_the_kernel_has(
    x, o, *, misuse
):
    o[0] = misuse(x)


def stored_rows(x, o):
    jax.vmap(lambda i, row: o.__setitem__(i, row))(jnp.arange(8), x[:8])


def rows_of_a_part(x, o):
    o[:8] = jax.vmap(lambda i: x.at[8:24][i])(jnp.arange(8))


def parts_of_rows(x, o):
    o[:8, :4] = jax.vmap(lambda i: x[i, plgpu.ds(i, 4)])(jnp.arange(8))


@pytest.mark.parametrize("misuse", [stored_rows, rows_of_a_part, parts_of_rows])
@refused_by(run)
def test_vmap_of_a_function_that_accesses_a_reference(x, o, *, misuse):
    misuse(x, o)


@pytest.mark.parametrize("value", [1.0, jnp.int32], ids=["scalar", "int32"])
@refused_by(run)
def test_an_update_with_another_type(x, o, *, value):
    value = value if isinstance(value, float) else x[...].astype(value)
    jax.ref.addupdate(o, ..., value)  # HERE


def test_the_hints_work():
    def body(x, o):
        i = position()

        @plgpu.when((i >= 0) & (i < 1))
        def _():
            total = plgpu.loop(0, i + 2, init_carry=jnp.zeros(128))(
                lambda k, acc: acc + x[k]
            )
            o[...] = jnp.where(
                x[...] > 0, total, lax.dynamic_slice_in_dim(x[...], i, 64)
            )

    x = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    out = everywhere.emulate(body, [x], x, grid={"i": 1})
    np.testing.assert_allclose(out, np.where(x > 0, x[0] + x[1], x), rtol=1e-6)


def escapes_when(x, size):
    kept = []

    @plgpu.when(position() == 0)
    def _():
        kept.append(x[0, :size])

    return kept[0]


def escapes_loop(x, size):
    kept = []
    lax.fori_loop(0, 2, lambda i, c: (kept.append(x[i, :size]), c)[1], 0)
    return kept[0]


def escapes_index(x, size):
    kept = []

    @plgpu.loop(0, 2)
    def _(i):
        kept.append(i)

    return x[kept[0], :size]


@pytest.mark.parametrize("escape", [escapes_when, escapes_loop, escapes_index])
@pytest.mark.parametrize("size", [128, 8192], ids=["small", "large"])
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@refused
def test_a_value_of_a_branch_or_a_loop_stays_in_it(escape, size, jitted):
    def body(x, o):
        o[...] = escape(x, size)

    kernel = everywhere.kernel(body, f32(size), grid={"i": 1})(None)
    (jax.jit(kernel) if jitted else kernel)(jnp.zeros((64, 8192)))


@pytest.mark.parametrize("maker", ["kernel", "jit"])
@pytest.mark.parametrize("computed", [False, True])
@refused
def test_a_value_of_another_function_is_an_argument(maker, computed):
    kept = []

    def keep(x, o):
        kept.append(x[0])
        o[...] = x[...]

    if maker == "kernel":
        run(keep)
    else:
        jax.jit(lambda x: kept.append(x[0]))(jnp.zeros((64, 128)))

    def body(x, o):
        o[0] = jnp.exp(kept[0]) if computed else x[0] + kept[0]

    run(body)


def test_values_of_the_functions_around_a_kernel_may_be_closed_over():
    def scaled(x, factor):
        def body(x_ref, o_ref):
            o_ref[...] = x_ref[...] * factor

        return plgpu.kernel(body, out_type=f32(8))(x)

    x = jnp.arange(8.0)

    @jax.jit
    def program(x, factor):
        y = lax.cond(
            factor > 0, lambda f: scaled(x, f), lambda f: scaled(x, -f), factor
        )
        y = lax.fori_loop(0, 2, lambda i, y: scaled(y, i + factor), y)
        return jax.vmap(scaled, in_axes=(None, 0))(y, jnp.stack([factor, factor]))

    expected = np.stack([x * 2 * 2 * 3 * 2] * 2)
    np.testing.assert_allclose(program(x, jnp.float32(2)), expected)


CARRIES = {
    "another shape": (lambda i, c: c + jnp.ones(128), 0.0),
    "another dtype": (lambda i, c: c * 1.5, np.int32(1)),
    "nothing": (lambda i, c: None, 0.0),
}


@pytest.mark.parametrize("name", CARRIES)
@refused_by(run)
def test_a_carry_of_jaxs_loops_keeps_its_type(x, o, *, name):
    o[0] = lax.fori_loop(0, 3, *CARRIES[name]) + x[0]


def test_jaxs_messages_name_the_authors_file():
    kept = []

    def body(x, o):
        kept.append(x[...])
        o[...] = x[...]

    run(body)
    with pytest.raises(jax.errors.UnexpectedTracerError) as info:
        jnp.exp(kept[0]) + 1
    assert "test_traced_values.py" in str(info.value)
    assert "_jax.py" not in str(info.value)


@refused_by(run)
def test_the_carry_of_a_while_loop_is_returned(x, o):
    o[0] = lax.while_loop(lambda c: c < 3, lambda c: None, 0) + x[0]
