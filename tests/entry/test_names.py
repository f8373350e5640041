# SPDX-License-Identifier: Apache-2.0
"""References have the author's names: parameters, and paths in them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.entry.names import parameter_names

OUT = jax.ShapeDtypeStruct((4,), jnp.float32)


@pytest.mark.parametrize(
    ("f", "args", "kwargs", "names"),
    [
        (lambda x, o, full: None, (1, 2, 3), {}, ["x", "o", "full"]),
        (lambda x, *refs: None, (1, 2, 3), {}, ["x", "refs[0]", "refs[1]"]),
        (lambda pair: None, ((1, {"b": 2}),), {}, ["pair[0]", "pair[1]['b']"]),
        (lambda *, b, a: None, (), {"b": 1, "a": 2}, ["a", "b"]),
        (lambda **refs: None, (), {"a": [1, 2]}, ["a[0]", "a[1]"]),
        (lambda x: None, (1, 2), {}, ["x", ""]),
        (functools.partial(lambda x, o: None, 0), (1,), {}, ["o"]),
    ],
)
def test_a_leaf_is_named_by_its_parameter_and_its_path(f, args, kwargs, names):
    assert parameter_names(f, args, kwargs) == names


def deadlock_of(body, scratch):
    run = plgpu.kernel(body, out_type=OUT, scratch_types=scratch, interpret=True)
    with pytest.raises(errors.DeadlockError) as caught:
        run()
    return str(caught.value)


RING = plgpu.Barrier(num_barriers=3)


def test_a_deadlock_names_the_barrier_as_the_author_does():
    def body(o, empty, full):
        plgpu.barrier_wait(full.at[2])  # HERE

    text = deadlock_of(body, [RING, RING])
    assert "waits for phase 0 of barrier full[2] at" in text
    assert "barrier full[2]: 0 phases complete" in text
    assert "test_names.py" in text


def test_a_barrier_is_named_in_dicts_star_arguments_and_inner_scopes():
    def star(o, *refs):
        plgpu.barrier_wait(refs[1])

    assert "of barrier refs[1] at" in deadlock_of(star, [RING, plgpu.Barrier()])

    def named(o, *, ready):
        plgpu.barrier_wait(ready["a"])

    assert "of barrier ready['a'] at" in deadlock_of(
        named, {"ready": {"a": plgpu.Barrier()}}
    )

    def scoped(o):
        plgpu.run_scoped(lambda inner: plgpu.barrier_wait(inner), plgpu.Barrier())

    assert "of barrier inner at" in deadlock_of(scoped, [])


def test_blocks_and_scratch_of_a_pallas_call_have_the_bodys_names():
    def body(x, o, ready):
        plgpu.barrier_wait(ready)

    run = plgpu.pallas_call(body, OUT, scratch_shapes=[plgpu.Barrier()])
    with pytest.raises(errors.DeadlockError, match="of barrier ready at"):
        run(jnp.ones(4))

    def unwritten(x, o, tile):
        o[...] = tile[...]

    scratch = [plgpu.SMEM((4,), jnp.float32)]
    run = plgpu.pallas_call(unwritten, OUT, scratch_shapes=scratch)
    with pytest.raises(errors.UninitializedReadError, match=r"\(tile\) is read"):
        run(jnp.ones(4))
