# SPDX-License-Identifier: Apache-2.0
"""`jax.Ref` as argument of a kernel, or captured by its body: updated in place."""

from __future__ import annotations

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.entry_kernels import f32, make, numbers
from tests.support.refusal import refused, refused_by

N = 128
X = numbers(N)


def double(ref):
    ref[...] = ref[...] * 2


def in_place(body=double, **options):
    return make(body, (), **options)


def by_argument(ref, interpret=None):
    in_place(interpret=interpret)(ref)


def by_closure(ref, interpret=None):
    in_place(lambda: double(ref), interpret=interpret)()


def by_loop_over_a_closure(ref, interpret=None):
    def body():
        @plgpu.loop(0, 2)
        def _(i):
            rows = plgpu.ds(i * 64, 64)
            ref[rows] = ref[rows] * 2

    in_place(body, interpret=interpret)()


def by_branch_and_function(ref, interpret=None):
    def body():
        @jax.jit
        def twice():
            double(ref)

        plgpu.when(ref[1] > 0)(twice)

    in_place(body, interpret=interpret)()


def by_copies(ref, interpret=None):
    def body(tile, barrier):
        plgpu.copy_gmem_to_smem(ref, tile, barrier)
        plgpu.barrier_wait(barrier)
        double(tile)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, ref)
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((N,), jnp.float32), plgpu.Barrier()]
    in_place(body, scratch_types=scratch, interpret=interpret)()


def by_blocks(ref, interpret=None):
    whole = plgpu.BlockSpec(memory_space=plgpu.GMEM)
    plgpu.pallas_call(double, (), in_specs=[whole], interpret=interpret)(ref)


def by_scratch_beside_a_closure(ref, interpret=None):
    def body():
        @plgpu.with_scoped(plgpu.GMEM((N,), jnp.float32))
        def doubled(scratch):
            scratch[...] = ref[...] * 2
            ref[...] = scratch[...]

        doubled()

    in_place(body, interpret=interpret)()


WAYS = [by_argument, by_closure, by_loop_over_a_closure, by_branch_and_function,
        by_scratch_beside_a_closure, by_copies, by_blocks]  # fmt: skip
each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


def of_array(way, interpret=None):
    def f(x):
        ref = jax.new_ref(x)
        way(ref, interpret)
        return jax.freeze(ref)

    return f


@each_way
def test_a_reference_is_updated_in_the_emulator_and_as_emitted(way):
    everywhere.check(lambda interpret: of_array(way, interpret), [X], [2 * X])


@each_way
def test_types_of_references_pass_the_checks_of_jax(way):
    with jax.enable_checks(True):
        np.testing.assert_array_equal(jax.jit(of_array(way))(X), 2 * X)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("way", [by_argument, by_closure])
def test_a_reference_of_the_caller_is_updated(way, jit):
    ref = jax.new_ref(X)
    if way is by_closure:
        f = lambda: way(ref)  # noqa: E731
        (jax.jit(f) if jit else f)()
    else:
        (jax.jit(way) if jit else way)(ref)
    np.testing.assert_array_equal(ref[...], 2 * X)


@pytest.mark.parametrize("way", [by_argument, by_closure])
def test_updates_in_loops_and_branches_of_jax_are_kept(way):
    def f(x):
        ref = jax.new_ref(x)
        lax.scan(lambda c, _: (way(ref), c)[1:] * 2, 0, length=2)
        lax.fori_loop(0, 2, lambda _, c: (way(ref), c)[1], 0)
        lax.cond(ref[1] > 0, lambda: way(ref), lambda: None)
        lax.while_loop(lambda i: i < 1, lambda i: (way(ref), i + 1)[1], 0)
        return ref[...]

    np.testing.assert_array_equal(jax.jit(f)(X), 64 * X)


@pytest.mark.parametrize("jit", [False, True])
def test_vmap_updates_each_instance(jit):
    ref = jax.new_ref(np.stack([X, X + 1]))
    f = jax.vmap(in_place())
    (jax.jit(f) if jit else f)(ref)
    np.testing.assert_array_equal(ref[...], 2 * np.stack([X, X + 1]))


def test_a_reference_that_is_only_read_may_be_shared_by_instances():
    ref = jax.new_ref(X)

    def body(x, read, o):
        o[...] = x[...] + read[...] * ref[...]

    f = jax.vmap(make(body, f32(N)), in_axes=(0, None))
    xs = np.stack([X, X + 1])
    np.testing.assert_array_equal(f(xs, ref), xs + X * X)


@pytest.mark.parametrize("jit", [False, True])
@refused
def test_instances_do_not_update_one_reference(jit):
    ref = jax.new_ref(X)

    def body(x):
        ref[...] = x[...]

    f = jax.vmap(in_place(body))
    (jax.jit(f) if jit else f)(np.stack([X, X]))  # HERE


@pytest.mark.parametrize("nested", [False, True])
def test_a_refused_call_updates_no_reference(nested):
    """All results are batched: the reference that is not is refused first."""
    shared = np.stack([X, X]) if nested else X
    full = np.stack([shared, shared])
    batched = jax.new_ref(full)

    def both(a, b):
        a[...] = a[...] + 1
        b[...] = b[...] + 1

    f = jax.vmap(in_place(both)) if nested else in_place(both)
    with pytest.raises(errors.UnsupportedError, match=r"write the same jax.Ref"):
        jax.vmap(f, in_axes=(0, None))(batched, jax.new_ref(shared))
    np.testing.assert_array_equal(batched[...], full)


def shared_by_closure(ref):
    def body(a, o):
        a[...] = jnp.full(N, 5.0, jnp.float32)
        o[...] = ref[0]

    return jax.vmap(make(body, f32(N)))(ref)


def shared_by_argument(ref):
    def body(a, b, o):
        a[...] = jnp.full(N, 5.0, jnp.float32)
        o[...] = b[0]

    return jax.vmap(make(body, f32(N)), in_axes=(0, None))(ref, ref)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("f", [shared_by_closure, shared_by_argument])
@refused
def test_an_instance_writes_no_part_of_a_reference_that_is_also_read(f, jit):
    def call(x):
        return f(jax.new_ref(x))

    (jax.jit(call) if jit else call)(X[None])


def test_what_an_instance_reads_of_the_others_is_an_array():
    """As the hint says."""
    ref = jax.new_ref(np.stack([X, X + 1]))

    def body(a, b, o):
        a[...] = a[...] * 2
        o[...] = b[0]

    f = jax.vmap(make(body, f32(N)), in_axes=(0, None))
    np.testing.assert_array_equal(f(ref, ref[...]), np.stack([X, X]))
    np.testing.assert_array_equal(ref[...], 2 * np.stack([X, X + 1]))


def test_a_reference_is_updated_beside_results_without_elements():
    ref = jax.new_ref(X)
    k = make(lambda o: double(ref), f32(0))
    assert k().shape == (0,)
    np.testing.assert_array_equal(ref[...], 2 * X)

    @jax.jit
    def traced(x):
        inner = jax.new_ref(x)
        make(lambda o: double(inner), f32(0))()
        return jax.freeze(inner)

    np.testing.assert_array_equal(traced(X), 2 * X)


def test_a_kernel_without_elements_and_references_is_not_traced():
    """Its blocks may be of no size, which no operation takes."""
    k = make(lambda x, o: x[...], f32(0))
    assert k(X).shape == (0,)


@pytest.mark.parametrize("jit", [False, True])
def test_one_reference_in_several_places_is_one_array(jit):
    def f(x):
        ref = jax.new_ref(x)

        def body(a, b):
            a[...] = b[...] + 1
            b[...] = a[...] + 1
            ref[...] = b[...] + a[...]

        in_place(body)(ref, ref)
        return ref[...]

    np.testing.assert_array_equal((jax.jit(f) if jit else f)(X), 2 * (X + 2))


def test_a_part_of_a_reference_is_updated():
    @jax.jit
    def f(x):
        ref = jax.new_ref(x)
        in_place()(ref.at[1])
        return ref[...]

    expected = np.stack([X, 2 * X])
    np.testing.assert_array_equal(f(np.stack([X, X])), expected)


def test_a_part_of_a_reference_outside_of_jit_is_taken_in_the_body_of_an_argument():
    """docs/differences.md: jax 0.11 has no `.at` of a reference that is not traced."""
    ref = jax.new_ref(np.stack([X, X]))
    before_0_12 = jax.__version__.startswith("0.11.")
    expects = pytest.raises(NotImplementedError) if before_0_12 else nullcontext()
    with expects:
        in_place(lambda: double(ref.at[0]))()
    in_place(lambda r: double(r.at[1]))(ref)
    first = X if before_0_12 else 2 * X
    np.testing.assert_array_equal(ref[...], np.stack([first, 2 * X]))


@refused_by(lambda body: jax.jit(body)(np.stack([X, X])))
def test_two_parts_of_a_reference_are_refused_if_one_is_written(x):
    ref = jax.new_ref(x)
    in_place(lambda a, b: a.set(b[...]))(ref.at[0], ref.at[1])  # HERE


def test_results_and_references_in_pytrees():
    def body(state, x, o):
        state["a"][0][...] = x[...]
        o[...] = state["b"][...] + state["a"][0][...]

    state = {"a": [jax.new_ref(X)], "b": jax.new_ref(X)}
    result = make(body, f32(N))(state, X + 1)
    np.testing.assert_array_equal(result, 2 * X + 1)
    np.testing.assert_array_equal(state["a"][0][...], X + 1)
    np.testing.assert_array_equal(state["b"][...], X)


def test_one_trace_serves_different_references():
    k = in_place(lambda a, b: a.set(b[...] * 2))
    first, second = jax.new_ref(X), jax.new_ref(X + 1)
    k(first, second)
    np.testing.assert_array_equal(first[...], 2 * X + 2)
    k(second, second)
    np.testing.assert_array_equal(second[...], 2 * X + 2)


def test_a_donated_array_is_updated_in_its_own_memory():
    """As XLA is told: the call's operand and result share a buffer, and so does jit."""
    f = jax.jit(of_array(by_argument), donate_argnums=0)
    text = f.trace(X).lower(lowering_platforms=("cuda",)).as_text()
    assert "tf.aliasing_output = 0" in text
    assert "output_tuple_indices = [], operand_index = 0" in text


@refused_by(lambda body: in_place(body, grid=(2,), grid_names=("i",))(jax.new_ref(X)))
def test_a_store_that_is_not_ordered_is_a_race_in_a_reference_too(ref):
    i = lax.axis_index("i")
    ref[plgpu.ds(0, 8)] = ref[plgpu.ds(8 * i, 8)] + 1  # HERE


@refused_by(lambda body: make(body)(numbers()))
def test_a_reference_of_a_kernel_is_no_argument_of_another(x, o):
    in_place()(x)  # HERE


# --- run_state ------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True])
def test_run_state_around_kernels(jit):
    def f(x):
        def steps(refs):
            by_argument(refs["x"])

            def body():
                refs["y"][...] = refs["x"][...] + 1

            in_place(body)()

        return plgpu.run_state(steps)({"x": x, "y": jnp.zeros_like(x)})

    end = (jax.jit(f) if jit else f)(X)
    np.testing.assert_array_equal(end["x"], 2 * X)
    np.testing.assert_array_equal(end["y"], 2 * X + 1)


@refused
def test_a_function_of_run_state_returns_nothing_outside_of_kernels_either():
    plgpu.run_state(lambda ref: ref[...])(X)  # HERE


@pytest.mark.parametrize("result", [(), None, {}, "of a kernel"])
def test_a_function_of_run_state_may_return_an_empty_pytree(result):
    kernel = in_place()
    steps = kernel if result == "of a kernel" else lambda ref: (kernel(ref), result)[1]
    np.testing.assert_array_equal(plgpu.run_state(steps)(X), 2 * X)
