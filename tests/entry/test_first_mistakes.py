# SPDX-License-Identifier: Apache-2.0
"""Mistakes of a first kernel: a missing @, an output that nothing is stored to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support.entry_kernels import numbers, run
from tests.support.refusal import refused, refused_by

OUT = jax.ShapeDtypeStruct((64, 128), jnp.float32)
X = np.zeros((64, 128), np.float32)


@pytest.mark.parametrize("who", ["when", "loop", "nd_loop"])
@refused
def test_a_decorator_without_its_at_sign_is_refused(who):
    arguments = {"when": (True,), "loop": (0, 4), "nd_loop": ((4,),)}[who]
    options = {"collective_axes": ()} if who == "nd_loop" else {}

    def body(x, o):
        o[...] = x[...]
        getattr(plgpu, who)(*arguments, **options)  # HERE

        def _(*_):
            o[...] = x[...]

    run(body)


def test_a_decorator_that_is_applied_later_is_one():
    def body(x, o):
        guard = plgpu.when(x[0, 0] == 0)
        guard(lambda: o.__setitem__(..., x[...] + 1))

    np.testing.assert_array_equal(run(body), numbers() + 1)


@refused_by(lambda body: plgpu.pallas_call(body, OUT)(X))
def test_an_output_block_that_nothing_stores_to_names_the_body(x, o):
    o = 2 * x[...]  # noqa: F841


@refused
def test_the_same_tma_copy_to_a_whole_result_in_each_program_is_refused():
    def body(x, o, tile):
        tile[...] = x[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o)  # HERE
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((64, 128), jnp.float32)]
    call = plgpu.pallas_call(body, OUT, grid=(4,), scratch_shapes=scratch)
    call(X)


@refused_by(run)
def test_a_loops_body_with_a_carry_needs_an_initial_one(x, o):
    @plgpu.loop(0, 4)  # HERE
    def total(i, carry):
        return carry + x[i]


@pytest.mark.parametrize("use", ["index", "unpack"])
@refused_by(run)
def test_the_info_of_a_loop_is_not_its_index(x, o, *, use):
    @plgpu.nd_loop((64,), collective_axes=())
    def _(info):
        (i,) = info if use == "unpack" else (info[0],)  # HERE
        o[i] = x[i]


def double(x, o):  # HERE
    o[...] = 2 * x[...]


CALLS = {
    "launched by brackets": lambda: plgpu.kernel(double, OUT)[(4,)](X),  # HERE
    "a call by brackets": lambda: plgpu.pallas_call(double, OUT)[(4,)](X),  # HERE
    "a constant": lambda: plgpu.kernel(double, OUT)(X, BLOCK=128),  # HERE
    "interpret": lambda: plgpu.kernel(double, OUT)(X, interpret=True),  # HERE
    "num_warps": lambda: plgpu.kernel(double, OUT)(X, num_warps=4),  # HERE
    "arrays by name": lambda: plgpu.kernel(double, OUT)(X, p={"a": X}),  # HERE
    "complex numbers": lambda: plgpu.kernel(double, OUT)(X.astype("c8")),  # HERE
    "a key": lambda: plgpu.kernel(double, OUT)(jax.random.key(0)),  # HERE
    "64 bits": lambda: plgpu.kernel(double, X.astype("f8"))(X),  # HERE
    "no out_type": lambda: plgpu.kernel(double, out_type=3),  # HERE
    "no out_shape": lambda: plgpu.kernel(double, out_shape=3),  # HERE
    "no out_shape of a pallas_call": lambda: plgpu.pallas_call(double, 3),  # HERE
    "the result": lambda: plgpu.pallas_call(double, OUT)(X, X),  # HERE
    "out_type": lambda: plgpu.pallas_call(double, out_type=OUT),  # HERE
    "scratch_types": lambda: plgpu.pallas_call(double, scratch_types=OUT),  # HERE
    "grid_names": lambda: plgpu.pallas_call(double, grid_names=OUT),  # HERE
    "num_warps of a call": lambda: plgpu.pallas_call(double, num_warps=4),  # HERE
    "num_stages": lambda: plgpu.kernel(double, num_stages=4),  # HERE
    "in_specs": lambda: plgpu.kernel(double, in_specs=OUT),  # HERE
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@refused
def test_a_call_with_arguments_of_another_one_is_explained(call):
    call()


BODIES = {
    "adds sums to rows": lambda x, o: o.set(x[...] + jnp.sum(x[...], 1)),  # HERE
    "adds some rows": lambda x, o: o.set(x[...] + x[:32]),  # HERE
    "spreads rows": lambda x, o: o.set(jnp.broadcast_to(x[:32], x.shape)),  # HERE
    "multiplies": lambda x, o: o.set(x[...] @ x[...]),  # HERE
    "formats a value": lambda x, o: print(f"{x[0, 0]:.3f}"),  # HERE
    "adds numbers to a reference": lambda x, o: plgpu.load(x + jnp.arange(64)),  # HERE
    "adds numbers to a view": lambda x, o: plgpu.load(x.at[0] + jnp.arange(64)),  # HERE
    "stores before an index": lambda x, o: plgpu.store(o, x[0], jnp.arange(64)),  # HERE
    "scans a reference": lambda x, o: lax.scan(lambda c, _: (c, None), 0, x),  # HERE
    "branches of two types": lambda x, o: one_of(x, lambda: x[0], lambda: 0),  # HERE
    "branches of two structures": lambda x, o: one_of(x, lambda: 0, lambda: ()),  # HERE
    "a branch by elements": lambda x, o: lax.cond(x[...] > 0, exit, exit),  # HERE
    "a loop while elements": lambda x, o: lax.while_loop(positive, sum, x[0]),  # HERE
    "a reshape of a block": lambda x, o: o.set(x[...].reshape(64, 64)),  # HERE
    "lax.reshape": lambda x, o: o.at[0].set(lax.reshape(x[...], (128,))),  # HERE
    "rows and columns": lambda x, o: o.set(jnp.concatenate([x[...], x[0]])),  # HERE
    "a stack": lambda x, o: o.set(jnp.stack([x[...], x[0]])),  # HERE
    "an axis too many": lambda x, o: o.set(jnp.sum(x[...], axis=2)),  # HERE
}


def one_of(x, *branches):
    return lax.switch(x[0, 0].astype(int), branches)


def positive(x):
    return x > 0


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@refused
def test_a_body_as_of_other_languages_is_explained(body):
    run(body)


INTS = jax.ShapeDtypeStruct((64, 128), jnp.int32)


@pytest.mark.parametrize("view", [lambda ref: ref, lambda ref: ref.at[:32]])
@refused_by(lambda body: plgpu.kernel(body, INTS)(jnp.ones((64, 128), jnp.int32)))
def test_references_that_are_added_are_no_pointers(x, o, *, view):
    o[...] = view(x) + view(x)
