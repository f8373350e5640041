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
GRID = {"grid": (4,), "grid_names": ("i",)}


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


def test_a_result_that_nothing_is_stored_to():
    kernel = plgpu.kernel(renames, out_type=OUT)
    assert found(kernel) == ["kernel renames: nothing is stored to result 0"]


def test_one_of_two_results_that_nothing_is_stored_to():
    def body(x, o, p):
        p[...] = x[...]

    kernel = plgpu.kernel(body, out_type=(OUT, OUT))
    assert found(kernel) == ["kernel body: nothing is stored to result 0"]


def test_a_block_of_a_result_that_nothing_is_stored_to():
    kernel = plgpu.pallas_call(renames, OUT)
    (text,) = found(kernel)
    assert text == "kernel renames: SMEM float32[1, 64, 128]"


def test_scratch_that_is_read_only():
    def body(x, o, tile):
        o[...] = tile[...]

    kernel = plgpu.kernel(body, out_type=OUT, scratch_types=[TILE])
    assert found(kernel) == ["kernel body: SMEM float32[64, 128]"]


def sums_rows(x, o):
    rows = plgpu.ds(lax.axis_index("i") * 16, 16)
    o[0] = jnp.sum(x[rows], axis=0)


def fetches_rows(x, o, tile):
    rows = plgpu.ds(lax.axis_index("i") * 16, 16)
    tile[:16] = x[rows]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, o)
    plgpu.wait_smem_to_gmem(0)


@pytest.mark.parametrize("body", [sums_rows, fetches_rows])
def test_elements_of_a_result_that_all_ctas_overwrite(body):
    scratch = [TILE] if body is fetches_rows else []
    kernel = plgpu.kernel(body, out_type=OUT, scratch_types=scratch, **GRID)
    (text,) = found(kernel)
    what = "all CTAs store the same elements of result 0"
    assert text == f"kernel {body.__name__}: {what}"


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


def adds_atomically(x, o):
    plgpu.atomic_add(o, x[...])


def test_no_warning_where_a_result_may_be_stored():
    bodies = (stores_in_a_branch, stores_in_a_loop, stores_in_a_function,
              stores_in_a_scope, stores_in_two_scopes, adds_atomically)  # fmt: skip
    for body in bodies:
        assert found(plgpu.kernel(body, out_type=OUT)) == [], body.__name__


def test_no_warning_where_a_result_is_an_argument_too():
    def body(x, o):
        plgpu.debug_print("{}", x[0, 0])

    gmem = plgpu.BlockSpec(memory_space=plgpu.GMEM)
    kernel = plgpu.pallas_call(
        body, OUT, in_specs=[gmem], out_specs=gmem, input_output_aliases={0: 0}
    )
    assert found(kernel) == []


def fills(x, o):
    o[0, 0] = 1.0


@pytest.mark.parametrize("body", [copies, copies_by_tma, fills])
def test_no_warning_where_all_ctas_store_the_same_values(body):
    scratch = [TILE] if body is copies_by_tma else []
    kernel = plgpu.kernel(body, out_type=OUT, scratch_types=scratch, **GRID)
    assert found(kernel) == []


POSITIONS = jax.ShapeDtypeStruct((4, 128), jnp.float32)


def test_no_warning_where_a_function_is_called_elsewhere_with_the_position():
    # Both calls of `jnp.where` are one jaxpr.
    def body(x, o, p):
        i = lax.axis_index("i")
        p[i] = jnp.where(x[i] > 0, x[i], 0.0)
        o[...] = x[...]
        o[0] = jnp.where(x[0] > 0, x[0], 0.0)

    kernel = plgpu.kernel(body, out_type=(OUT, POSITIONS), **GRID)
    assert found(kernel) == []


def test_a_function_that_is_called_with_the_position_is_followed():
    def body(x, o, p):
        i = lax.axis_index("i")
        p[i] = jnp.where(x[0] > 0, x[0], 0.0)
        o[0] = jnp.where(x[i] > 0, x[i], 0.0)

    kernel = plgpu.kernel(body, out_type=(OUT, POSITIONS), **GRID)
    assert found(kernel) == [
        "kernel body: all CTAs store the same elements of result 0"
    ]


def test_no_warning_about_a_position_on_an_axis_of_one_cta():
    def body(x, o):
        o[...] = x[...]
        o[0] = x[lax.axis_index("j")]

    kernel = plgpu.kernel(body, out_type=OUT, grid=(4, 1), grid_names=("i", "j"))
    assert found(kernel) == []


def test_no_warning_where_one_cta_stores():
    def body(x, o):
        @plgpu.when(lax.axis_index("i") == 0)
        def _():
            o[...] = x[...]

    assert found(plgpu.kernel(body, out_type=OUT, **GRID)) == []


def test_no_warning_where_a_condition_of_the_copy_chooses_the_cta():
    def body(x, o, tile):
        tile[...] = x[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o, predicate=lax.axis_index("i") == 0)
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(body, out_type=OUT, scratch_types=[TILE], **GRID)
    assert found(kernel) == []
    whole = plgpu.pallas_call(
        lambda x, o, tile: body_of_first(x, o, tile),
        OUT,
        grid=(4,),
        scratch_shapes=[TILE],
    )
    assert found(whole) == []


def body_of_first(x, o, tile):
    tile[...] = x[...]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, o, predicate=plgpu.program_id(0) == 0)
    plgpu.wait_smem_to_gmem(0)


def test_no_warning_where_the_other_member_of_a_union_is_stored_to():
    def body(x, o, both):
        first, second = both
        first[...] = x[...]
        o[...] = second[...]

    kernel = plgpu.kernel(
        body, out_type=OUT, scratch_types=[plgpu.RefUnion(TILE, TILE)]
    )
    assert found(kernel) == []
