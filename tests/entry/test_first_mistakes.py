# SPDX-License-Identifier: Apache-2.0
"""Mistakes of a first kernel: a missing @, an output that nothing is stored to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.entry_kernels import numbers, run
from tests.support.refusal import refused

OUT = jax.ShapeDtypeStruct((64, 128), jnp.float32)
X = np.zeros((64, 128), np.float32)
INPUT = numbers()  # of `run`


@pytest.mark.parametrize("who", ["when", "loop", "nd_loop"])
def test_a_decorator_without_its_at_sign_is_refused(who):
    arguments = {"when": (True,), "loop": (0, 4), "nd_loop": ((4,),)}[who]
    options = {"collective_axes": ()} if who == "nd_loop" else {}

    def body(x, o):
        o[...] = x[...]
        getattr(plgpu, who)(*arguments, **options)  # HERE

        def _(*_):
            o[...] = x[...]

    with refused(
        errors.KernelError,
        f"{who} is called and decorates no function",
        expected=f"@plgpu.{who}(...)",
        hint="write the @",
    ):
        run(body)


def test_a_decorator_that_is_applied_later_is_one():
    def body(x, o):
        guard = plgpu.when(x[0, 0] == 0)
        guard(lambda: o.__setitem__(..., x[...] + 1))

    np.testing.assert_array_equal(run(body), INPUT + 1)


def test_an_output_block_that_nothing_stores_to_names_the_body():
    def body(x, o):
        o = 2 * x[...]  # noqa: F841

    call = plgpu.pallas_call(body, OUT)
    with pytest.raises(errors.UninitializedReadError) as info:
        call(X)
    assert "(o) is read where nothing has been written" in info.value.what
    assert "the body stores the block of a result: ref[...] = x" in info.value.hint


def test_the_same_tma_copy_to_a_whole_result_in_each_program_is_refused():
    def body(x, o, tile):
        tile[...] = x[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o)  # HERE
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((64, 128), jnp.float32)]
    call = plgpu.pallas_call(body, OUT, grid=(4,), scratch_shapes=scratch)
    what = "result 0 of pallas_call body: several CTAs write the same elements"
    with refused(errors.ArgumentError, what):
        call(X)


def test_a_loops_body_with_a_carry_needs_an_initial_one():
    def body(x, o):
        @plgpu.loop(0, 4)  # HERE
        def total(i, carry):
            return carry + x[i]

    with refused(
        errors.ArgumentTypeError,
        "loop: the body's signature does not match its arguments",
        expected="1 positional argument",
        hint="init_carry=x",
    ):
        run(body)


def test_a_scan_over_a_reference_is_refused():
    def body(x, o):
        total, _ = lax.scan(lambda c, row: (c + row, None), jnp.zeros(128), x)  # HERE
        o[0] = total

    with refused(
        errors.ArgumentTypeError,
        "scan over a value that has no leading axis",
        hint="lax.scan(f, init, x_ref[...])",
    ):
        run(body)


@pytest.mark.parametrize("use", ["index", "unpack"])
def test_the_info_of_a_loop_is_not_its_index(use):
    def body(x, o):
        @plgpu.nd_loop((64,), collective_axes=())
        def _(info):
            (i,) = info if use == "unpack" else (info[0],)  # HERE
            o[i] = x[i]

    with refused(
        errors.ArgumentTypeError,
        "the argument of a loop's body is indexed",
        hint="info.index[0]",
    ):
        run(body)


def test_a_value_before_its_index_is_refused():
    def body(x, o):
        plgpu.store(o, x[0], jnp.arange(128))  # HERE

    with refused(
        errors.ArgumentTypeError,
        "invalid index of a reference",
        hint="plgpu.store(ref, index, x)",
    ):
        run(body)
