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


NOTHING = "nothing is stored to result 0"
OVERWRITTEN = "all CTAs store the same elements of result 0"


@pytest.mark.parametrize(
    ("body", "options", "text"),
    [
        (renames, {}, NOTHING),
        (stores_to_the_other, {"out_type": (OUT, OUT)}, NOTHING),
        (reads_scratch, SCRATCH, "SMEM float32[64, 128]"),
        (sums_rows, GRID, OVERWRITTEN),
        (fetches_rows, GRID | SCRATCH, OVERWRITTEN),
        (calls_a_function_with_the_position, GRID | AND_POSITIONS, OVERWRITTEN),
    ],
)
def test_a_result_that_stays_undefined(body, options, text):
    kernel = plgpu.kernel(body, **{"out_type": OUT, **options})
    assert found(kernel) == [f"kernel {body.__name__}: {text}"]


def test_a_block_of_a_result_that_nothing_is_stored_to():
    (text,) = found(plgpu.pallas_call(renames, OUT))
    assert text == "kernel renames: SMEM float32[1, 64, 128]"


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


def fills(x, o):
    o[0, 0] = 1.0


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


@pytest.mark.parametrize(
    ("body", "options"),
    [
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
        (fills, GRID),
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
