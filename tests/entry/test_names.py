# SPDX-License-Identifier: Apache-2.0
"""References have the author's names: parameters, and paths in them."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.entry.scoped import parameter_names
from tests.support import everywhere
from tests.support.refusal import refused, refused_by

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


RING = plgpu.Barrier(num_barriers=3)


@refused_by(everywhere.emulate, [], OUT, RING, RING)
def test_a_deadlock_names_the_barrier_as_the_author_does(o, empty, full):
    plgpu.barrier_wait(full.at[2])  # HERE


def star(o, *refs):
    plgpu.barrier_wait(refs[1])


def named(o, *, ready):
    plgpu.barrier_wait(ready["a"])


def scoped(o):
    plgpu.run_scoped(lambda inner: plgpu.barrier_wait(inner), plgpu.Barrier())


BARRIERS = {
    star: ([RING, plgpu.Barrier()], "refs[1]"),
    named: ({"ready": {"a": plgpu.Barrier()}}, "ready['a']"),
    scoped: ([], "inner"),
}


@pytest.mark.parametrize("body", BARRIERS, ids=lambda body: body.__name__)
def test_a_barrier_is_named_in_dicts_star_arguments_and_inner_scopes(body):
    scratch, name = BARRIERS[body]
    with pytest.raises(errors.DeadlockError, match=f"of barrier {re.escape(name)} at"):
        everywhere.emulate(body, [], OUT, scratch_types=scratch)


def waits(x, o, ready):
    plgpu.barrier_wait(ready)  # HERE


def reads(x, o, tile):
    o[...] = tile[...]  # HERE


@pytest.mark.parametrize(
    ("body", "scratch"), [(waits, plgpu.Barrier()), (reads, plgpu.SMEM((4,), "f4"))]
)
@refused
def test_blocks_and_scratch_of_a_pallas_call_have_the_bodys_names(body, scratch):
    plgpu.pallas_call(body, OUT, scratch_shapes=[scratch])(jnp.ones(4))
