# SPDX-License-Identifier: Apache-2.0
"""Warnings about results that stay undefined, when a kernel is lowered."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors

OUT = jax.ShapeDtypeStruct((64, 128), jnp.float32)
TILE = plgpu.SMEM((64, 128), jnp.float32)
POSITIONS = jax.ShapeDtypeStruct((4, 128), jnp.float32)
GRID = {"grid": (4,), "grid_names": ("i",)}
SCRATCH = {"scratch_types": [TILE]}
AND_POSITIONS = {"out_type": (OUT, POSITIONS)}
UNION = plgpu.RefUnion(TILE, TILE)


def found(kernel) -> list[str]:
    """The first lines of the warnings about undefined results."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plgpu.offline.lower(kernel, OUT)
    of_results = [w for w in caught if w.category is errors.UndefinedResultWarning]
    assert all(w.filename.endswith("test_undefined.py") for w in of_results)
    return [str(w.message).partition(" (")[0] for w in of_results]


def renames(x, o):
    o = 2 * x[...]  # noqa: F841


def copies(x, o):
    o[...] = x[...]


def copies_by_tma(x, o, tile):
    tile[...] = x[...]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, o)
    plgpu.wait_smem_to_gmem(0)


def stores_to_the_other(x, o, p):
    p[...] = x[...]


def reads_scratch(x, o, tile):
    o[...] = tile[...]


def sums_rows(x, o):
    rows = plgpu.ds(lax.axis_index("i") * 16, 16)
    o[0] = jnp.sum(x[rows], axis=0)


def fetches_rows(x, o, tile):
    rows = plgpu.ds(lax.axis_index("i") * 16, 16)
    tile[:16] = x[rows]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, o)
    plgpu.wait_smem_to_gmem(0)


def calls_a_function_with_the_position(x, o, p):
    i = lax.axis_index("i")
    p[i] = jnp.where(x[0] > 0, x[0], 0.0)
    o[0] = jnp.where(x[i] > 0, x[i], 0.0)


def fills(x, o):
    o[0, 0] = 1.0


NOTHING = "nothing is stored to result 0"
OVERWRITTEN = "the CTAs along 'i' store the same elements of result 0"
ALL_BUT_ONE_ROW = "nothing is stored to elements [1:64, 0:128] of result 0"


@pytest.mark.parametrize(
    ("body", "options", "text"),
    [
        (renames, {}, NOTHING),
        (stores_to_the_other, {"out_type": (OUT, OUT)}, NOTHING),
        (reads_scratch, SCRATCH, "SMEM float32[64, 128]"),
        (sums_rows, GRID, [ALL_BUT_ONE_ROW, OVERWRITTEN]),
        (fetches_rows, GRID | SCRATCH, OVERWRITTEN),
        (
            calls_a_function_with_the_position,
            GRID | AND_POSITIONS,
            [ALL_BUT_ONE_ROW, OVERWRITTEN],
        ),
        (fills, {}, "nothing is stored to elements [0:1, 1:128] of result 0"),
    ],
)
def test_a_result_that_stays_undefined(body, options, text):
    kernel = plgpu.kernel(body, **{"out_type": OUT, **options})
    texts = [text] if isinstance(text, str) else text
    assert found(kernel) == [f"kernel {body.__name__}: {text}" for text in texts]


def test_a_block_of_a_result_that_nothing_is_stored_to():
    (text,) = found(plgpu.pallas_call(renames, OUT))
    assert text == "kernel renames: SMEM float32[1, 64, 128]"


# --- parts of results, and axes on which an index does not depend ---------------------


def rows_of(start, count=16):
    """A body that stores the rows from one on that depends on the position."""

    def body(x, o):
        rows = plgpu.ds(start(lax.axis_index("i")), count)
        o[rows] = x[rows]

    return body


def stores_three_of_four_steps(x, o):
    @plgpu.loop(0, 3)
    def _(k):
        rows = plgpu.ds(lax.axis_index("i") * 8 + k * 16, 8)
        o[rows] = x[rows]


def rows_of_warpgroups(x, o):
    rows = plgpu.ds(lax.axis_index("i") * 16 + lax.axis_index("wg") * 8, 8)
    o[rows] = x[rows]


def depends_on_both(x, o):
    rows = plgpu.ds(lax.axis_index("i") * 32, 32)
    o[rows] = x[rows] * lax.axis_index("j").astype(jnp.float32)


PARTS = {
    "too few CTAs": (rows_of(lambda i: i * 16), {"grid": (2,)}, "[32:64, 0:128]"),
    "gaps": (rows_of(lambda i: i * 32), {"grid": (2,)}, "[16:32, 0:128]"),
    "another row": (rows_of(lambda i: i * 16 + 1), {"grid": (3,)}, "[0:1, 0:128]"),
    "too few steps": (stores_three_of_four_steps, {"grid": (2,)}, "[48:64, 0:128]"),
    "a range": (rows_of(lambda i: lax.rem(i, 2) * 16), GRID, "[32:64, 0:128]"),
}


@pytest.mark.parametrize(("body", "options", "part"), PARTS.values(), ids=PARTS)
def test_a_part_of_a_result_that_no_cta_stores_to(body, options, part):
    texts = found(plgpu.kernel(body, out_type=OUT, **GRID | options))
    assert f"kernel body: nothing is stored to elements {part} of result 0" in [
        text.replace(body.__name__, "body") for text in texts
    ]


def test_blocks_of_a_result_that_the_grid_does_not_reach():
    block = plgpu.BlockSpec((16, 128), lambda i: (i, 0))
    specs = {"in_specs": [block], "out_specs": block}
    texts = found(plgpu.pallas_call(copies, OUT, grid=(3,), **specs))
    assert texts == [
        "kernel copies: nothing is stored to elements [48:64, 0:128] of result 0"
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"grid": (2, 2), "grid_names": ("i", "j")},
        {"cluster": (2, 2), "cluster_names": ("i", "j")},
        {"grid": (2,), "grid_names": ("i",), "cluster": (2,), "cluster_names": ("j",)},
    ],
)
def test_ctas_along_an_axis_that_the_index_does_not_use(options):
    assert found(plgpu.kernel(depends_on_both, out_type=OUT, **options)) == [
        "kernel depends_on_both: the CTAs along 'j' store the same elements of result 0"
    ]


# --- kernels that define their results, or may ----------------------------------------


def stores_in_a_branch(x, o):
    @plgpu.when(x[0, 0] > 0)
    def _():
        o[...] = x[...]


def stores_in_a_loop(x, o):
    @plgpu.loop(0, 64)
    def _(i):
        o[i] = x[i]


def stores_in_a_function(x, o):
    jax.jit(lambda ref: ref.__setitem__(..., x[...]))(o)


def stores_in_a_scope(x, o):
    plgpu.run_scoped(lambda tile: copies_by_tma(x, o, tile), TILE)


def stores_in_two_scopes(x, o):
    def first(tile, barrier):
        @plgpu.when(x[0, 0] > 0)
        def _():
            plgpu.copy_gmem_to_smem(x, tile, barrier)
            plgpu.barrier_wait(barrier)

        o[:32] = tile[:32]

    def second(tile):
        tile[...] = x[...]
        o[32:] = tile[32:]

    plgpu.run_scoped(first, TILE, plgpu.Barrier())
    plgpu.run_scoped(second, TILE)


def stores_an_element_of_scratch(x, o, tile):
    tile[...] = x[...]
    o[...] = jnp.full((64, 128), tile[0, 0])


def adds_atomically(x, o):
    plgpu.atomic_add(o, x[...])


def calls_a_function_elsewhere_with_the_position(x, o, p):
    """Both calls of `jnp.where` are one jaxpr."""
    i = lax.axis_index("i")
    p[i] = jnp.where(x[i] > 0, x[i], 0.0)
    o[...] = x[...]
    o[0] = jnp.where(x[0] > 0, x[0], 0.0)


def reads_a_position_on_an_axis_of_one_cta(x, o):
    o[...] = x[...]
    o[0] = x[lax.axis_index("j")]


def stores_in_one_cta(x, o):
    @plgpu.when(lax.axis_index("i") == 0)
    def _():
        o[...] = x[...]


def copies_in_one_cta(x, o, tile, position=lambda: lax.axis_index("i")):
    tile[...] = x[...]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, o, predicate=position() == 0)
    plgpu.wait_smem_to_gmem(0)


def stores_to_the_other_member_of_a_union(x, o, both):
    first, second = both
    first[...] = x[...]
    o[...] = second[...]


def sums_in_a_cluster(x, o, mine, met):
    """All CTAs store the same sum."""
    c = lax.axis_index("c")
    mine[...] = x[c]
    plgpu.barrier_arrive(met)
    plgpu.barrier_wait(met)
    total = mine[...] + plgpu.cluster_ref(mine, {"c": 1 - c})[...]
    o[...] = jnp.broadcast_to(total, (64, 128))
    plgpu.barrier_arrive(met)
    plgpu.barrier_wait(met)


def sums_after_cluster_sync(x, o, mine):
    """All CTAs store the same sum, by way of GMEM."""
    mine[lax.axis_index("c")] = x[lax.axis_index("c")]
    plgpu.cluster_sync()
    o[...] = jnp.broadcast_to(mine[0] + mine[1], (64, 128))


def takes_turns(x, o):
    @plgpu.nd_loop((8,), collective_axes="i")
    def _(info):
        rows = plgpu.ds(info.index[0] * 8, 8)
        o[rows] = x[rows]


def stores_elements(x, o):
    rows = lax.broadcasted_iota(jnp.int32, (64, 128), 0)
    columns = lax.broadcasted_iota(jnp.int32, (64, 128), 1)
    plgpu.store(o, (rows, columns), x[...])


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (rows_of(lambda i: i * 16), GRID),
        (rows_of(lambda i: jnp.minimum(i * 24, 40), 24), GRID),
        (rows_of(lambda i: i // 2 * 32, 32), GRID),
        (rows_of_warpgroups, GRID | {"num_threads": 2, "thread_name": "wg"}),
        (takes_turns, GRID),
        (stores_elements, {}),
        (
            sums_in_a_cluster,
            {
                "cluster": (2,),
                "cluster_names": ("c",),
                "scratch_types": [
                    plgpu.SMEM((128,), jnp.float32),
                    plgpu.ClusterBarrier(collective_axes="c"),
                ],
            },
        ),
        (
            sums_after_cluster_sync,
            {
                "cluster": (2,),
                "cluster_names": ("c",),
                "scratch_types": [plgpu.GMEM((2, 128), jnp.float32)],
            },
        ),
        (stores_in_a_branch, {}),
        (stores_in_a_loop, {}),
        (stores_in_a_function, {}),
        (stores_in_a_scope, {}),
        (stores_in_two_scopes, {}),
        (stores_an_element_of_scratch, SCRATCH),
        (adds_atomically, {}),
        # All CTAs store the same values.
        (copies, GRID),
        (copies_by_tma, GRID | SCRATCH),
        (calls_a_function_elsewhere_with_the_position, GRID | AND_POSITIONS),
        (
            reads_a_position_on_an_axis_of_one_cta,
            {"grid": (4, 1), "grid_names": ("i", "j")},
        ),
        (stores_in_one_cta, GRID),
        (copies_in_one_cta, GRID | SCRATCH),
        (stores_to_the_other_member_of_a_union, {"scratch_types": [UNION]}),
    ],
)
def test_no_warning_where_a_result_may_be_defined(body, options):
    assert found(plgpu.kernel(body, **{"out_type": OUT, **options})) == []


def test_no_warning_where_a_result_is_an_argument_too():
    def body(x, o):
        plgpu.debug_print("{}", x[0, 0])

    gmem = plgpu.BlockSpec(memory_space=plgpu.GMEM)
    kernel = plgpu.pallas_call(
        body, OUT, in_specs=[gmem], out_specs=gmem, input_output_aliases={0: 0}
    )
    assert found(kernel) == []


def test_no_warning_where_a_program_chooses_whether_to_copy_a_block():
    def body(x, o, tile):
        copies_in_one_cta(x, o, tile, lambda: plgpu.program_id(0))

    kernel = plgpu.pallas_call(body, OUT, grid=(4,), scratch_shapes=[TILE])
    assert found(kernel) == []
