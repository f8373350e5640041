# SPDX-License-Identifier: Apache-2.0
"""Multicasts of any shape along any cluster axes: emulator and emitted code agree."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.lockstep.copies import tma
from tests.support import everywhere
from tests.support.lockstep import kernels as in_lockstep
from tests.support.semantics import BOTH, under

NAMES = "abc"
BF16, F32 = jnp.bfloat16, jnp.float32


def tiled(columns):
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))


def multicast(shape, dtype, cluster, axes, transforms=()):
    """A kernel whose CTAs copy the row of those that share it, the row, the result."""
    names = NAMES[: len(cluster)]
    own = [i for i, name in enumerate(names) if name not in axes]

    def row(position):
        number = 0
        for i in own:
            number = number * cluster[i] + position[i]
        return number

    def body(x, o, tile, barrier):
        position = tuple(lax.axis_index(name) for name in names)
        plgpu.copy_gmem_to_smem(
            x.at[row(position)], tile, barrier, collective_axes=tuple(axes)
        )
        plgpu.barrier_wait(barrier)
        o[position] = tile[...]

    make = everywhere.kernel(
        body,
        jax.ShapeDtypeStruct((*cluster, *shape), dtype),
        plgpu.SMEM(shape, dtype, transforms=transforms),
        plgpu.Barrier(),
        cluster=cluster,
        cluster_names=tuple(names),
    )

    rows = math.prod(cluster[i] for i in own)
    x = (np.arange(rows * math.prod(shape)) % 97).reshape(rows, *shape).astype(dtype)
    result = np.zeros((*cluster, *shape), dtype)
    for position in np.ndindex(*cluster):
        result[position] = x[row(position)]
    return make, x, result


SHAPES = [
    ((1, 128, 64), BF16, (2,), ()),
    ((3, 128), F32, (2,), ()),
    ((3, 128), F32, (4,), ()),
    ((64,), F32, (2,), ()),
    ((1, 128, 64), BF16, (2,), tiled(64)),
    ((3, 64, 64), BF16, (4,), tiled(64)),
    ((24, 128), F32, (6,), tiled(32)),
    ((16, 64), jnp.int4, (4,), ()),
]


@pytest.mark.parametrize(
    ("shape", "dtype", "cluster", "transforms"),
    SHAPES,
    ids=[f"{n}-{'x'.join(map(str, case[0]))}" for n, case in enumerate(SHAPES)],
)
def test_a_multicast_of_any_shape_reaches_all_ctas(shape, dtype, cluster, transforms):
    make, x, result = multicast(shape, dtype, cluster, "a", transforms)
    everywhere.check(make, [x], result)


@pytest.mark.parametrize("axes", ["a", "c", "ba", "ac", "cb", "abc"])
def test_a_multicast_along_any_axes_reaches_the_ctas_along_them(axes):
    make, x, result = multicast((16, 128), F32, (2, 2, 2), axes)
    everywhere.check(make, [x], result)


def test_an_axis_has_a_tuple_for_a_name():
    """`lax.axis_index` does not know it: all CTAs along it store equal values."""

    def body(x, o, tile, barrier, ready):
        row = lax.axis_index("c")
        axes = (("a", "b"),)
        plgpu.copy_gmem_to_smem(x.at[row], tile, barrier, collective_axes=axes)
        plgpu.barrier_wait(barrier)
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        o[row] = tile[...]

    x = np.arange(2 * 16 * 128, dtype=F32).reshape(2, 16, 128)
    scratch = (
        plgpu.SMEM((16, 128), F32),
        plgpu.Barrier(),
        plgpu.ClusterBarrier(collective_axes=((("a", "b"),), "c")),
    )
    cluster = {("a", "b"): 2, "c": 2}
    # The models of lockstep take equal stores for a mistake.
    everywhere.run(body, [x], x, *scratch, cluster=cluster, executed=())


# 9, 15 and 16 CTAs need the attribute of non-portable cluster sizes.
CLUSTERS = [(2, 1), (1, 2), (2, 2), (4, 1), (16, 1), (1, 16), (9,), (3, 5), (4, 2, 2)]


def along(cluster):
    """All choices of cluster axes."""
    names = NAMES[: len(cluster)]
    counts = range(1, len(names) + 1)
    return [axes for n in counts for axes in itertools.combinations(names, n)]


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
@pytest.mark.parametrize("semantics", BOTH)
def test_a_mask_has_the_ctas_that_differ_along_the_axes(
    semantics, cluster, monkeypatch
):
    """PTX ISA: bit r of the mask is the CTA of %cluster_ctarank r; x is fastest."""
    sent = {}

    class Recorded(tma._LoadWork):
        def __init__(self, issue, address, barrier, targets, trackers=None):
            masks = sent.setdefault(issue.strand.cta.rank, set())
            masks.add(tuple(cta.rank for cta in targets))
            super().__init__(issue, address, barrier, targets, trackers)

    monkeypatch.setattr(tma, "_LoadWork", Recorded)
    # The last axis is x.
    places = list(np.ndindex(*cluster))
    for axes in along(cluster):
        own = [i for i, name in enumerate(NAMES[: len(cluster)]) if name not in axes]
        line = [[place[i] for i in own] for place in places]
        sent.clear()
        rows = math.prod(
            n for n, name in zip(cluster, NAMES, strict=False) if name in axes
        )
        make, x, result = multicast((rows, 128), F32, cluster, axes)
        (got,) = in_lockstep.run(make(None), [x], semantics)
        np.testing.assert_array_equal(got, result)
        masks = {
            rank: {tuple(r for r, other in enumerate(line) if other == line[rank])}
            for rank in range(len(places))
        }
        # One CTA by itself needs no mask, and here no tensor map either.
        assert sent == (masks if rows > 1 else {})


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_a_cluster_of_any_shape_shares_what_it_copies(cluster):
    names = NAMES[: len(cluster)]
    make, x, result = multicast((math.prod(cluster), 128), F32, cluster, names)
    everywhere.check(make, [x], result)


@pytest.mark.parametrize(
    ("shape", "cluster"),
    [
        pytest.param((5, 7, 16), (2,), id="no-equal-pieces"),
        pytest.param((1, 1, 64), (4,), id="pieces-of-64-bytes"),
    ],
)
def test_what_the_compiler_cannot_divide_the_emulator_refuses(shape, cluster):
    make, x, _ = multicast(shape, F32, cluster, "a")
    texts = set()
    for function in (
        make(plgpu.InterpretParams()),
        *(under(semantics, make(None)) for semantics in BOTH),
    ):
        with pytest.raises(errors.LayoutError, match="equal pieces") as info:
            jax.eval_shape(function, x)
        texts.add(info.value.what)
    assert texts == {"no tensor map describes this copy"}
