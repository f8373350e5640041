# SPDX-License-Identifier: Apache-2.0
"""Unions: scratch arrays that share memory, everywhere with the same bytes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, offline
from pallas_gpu.memory.sharing import inferred_members
from tests.support import everywhere
from tests.support.entry_kernels import numbers, run
from tests.support.refusal import refused, refused_by
from tests.support.semantics import BOTH, Warpgroup

F16, F32, I32 = jnp.float16, jnp.float32, jnp.int32
ACC = plgpu.ACC((64, 64))
ROWS = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
TILE = plgpu.SMEM((64, 128), F32)
SWIZZLED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


def two(first=F32, second=I32):
    return plgpu.RefUnion(plgpu.SMEM((64, 128), first), plgpu.SMEM((64, 128), second))


def swizzled_bytes(x: np.ndarray) -> np.ndarray:
    """The bytes of float32[64, 128] as `SWIZZLED` stores it (PTX ISA, "Swizzling").

    Tiles of 8 rows of 128 bytes, whose units of 16 bytes are exchanged: unit u of row r
    lies where u xor r is.
    """
    tiles = x.reshape(8, 8, 4, 8, 4).transpose(0, 2, 1, 3, 4)  # tile, row, unit, word
    out = np.empty_like(tiles)
    for row in range(8):
        for unit in range(8):
            out[:, :, row, unit ^ row] = tiles[:, :, row, unit]
    return np.frombuffer(out.tobytes(), np.uint8)


# --- what unions do -------------------------------------------------------------------


HALF = plgpu.SMEM((32, 128), F32)


@pytest.mark.smoke
@everywhere.gives(
    [ROWS],
    ROWS * np.float32([2, 3]).repeat(32)[:, None],
    plgpu.RefUnion(TILE, [HALF, HALF]),
)
def test_a_union_unpacks_to_its_alternatives(x, o, union):
    whole, (top, bottom) = union
    whole[...] = x[...]
    value = whole[...]
    top[...] = value[:32] * 2
    bottom[...] = value[32:] * 3
    o[:32] = union[1][0][...]
    o[32:] = bottom[...]


def nested(after=True):
    """Tiles of 32 rows: one and two more; or one, and four of 8 in place of them."""
    few = [plgpu.SMEM((8, 128), F32) for _ in range(4)]
    inner = plgpu.RefUnion(HALF, few)
    return plgpu.RefUnion(
        plgpu.SMEM((96, 128), F32), [HALF, inner, HALF] if after else inner
    )


QUARTERS = np.arange(1, 5, dtype=np.float32).repeat(8)[:, None]


@everywhere.gives(
    [ROWS], np.concatenate([2 * ROWS[:32] + 1, ROWS[32:] * QUARTERS]), nested()
)
def test_unions_nest(x, o, union):
    whole, (top, (middle, quarters), bottom) = union
    whole[:64] = x[...]
    whole[64:] = x[:32] + 1
    value = middle[...]
    for i, quarter in enumerate(quarters):
        quarter[...] = value[8 * i : 8 * i + 8] * (i + 1)
    o[:32] = top[...] + bottom[...]
    o[32:] = whole[32:64]


@everywhere.gives(
    [], np.float32([3, 7]).repeat(32)[:, None] * np.ones_like(ROWS), nested(), HALF
)
def test_an_array_behind_an_inner_union_lies_behind_its_longest_alternative(
    o, union, after
):
    _, (top, (middle, quarters), bottom) = union
    for value, parts in enumerate([[bottom], [after], quarters, [top]], 1):
        for part in parts:
            part[...] = jnp.full(part.shape, value, F32)
    o[:32] = bottom[...] + after[...]
    o[32:] = middle[...] + top[...]


@refused_by(run, scratch_types=[nested(after=False), plgpu.Barrier()])
def test_a_race_between_members_of_an_inner_union_is_reported(x, o, union, full):
    _, (middle, quarters) = union
    plgpu.copy_gmem_to_smem(x.at[:32], middle, full)
    quarters[3][...] = x[:8]  # HERE
    plgpu.barrier_wait(full)
    o[...] = x[...]


@everywhere.gives(
    [ROWS],
    swizzled_bytes(ROWS).view(np.int32).reshape(64, 128),
    plgpu.RefUnion(
        plgpu.SMEM((64, 128), F32, transforms=SWIZZLED), plgpu.SMEM((64, 128), I32)
    ),
)
def test_bytes_lie_where_transforms_say(x, o, union):
    tiled, plain = union
    tiled[...] = x[...]
    o[...] = plain[...]


CHANGED = ROWS.copy()
CHANGED[8:16] = 0
CHANGED[40:48] += 1


@everywhere.gives([ROWS], CHANGED.view(np.int32), two())
def test_a_part_that_is_written_changes_its_bytes_alone(x, o, union):
    floats, words = union
    floats[...] = x[...]
    words[8:16] = jnp.zeros((8, 128), I32)
    floats[40:48] = floats[40:48] + 1
    o[...] = words[...]


@everywhere.gives(
    [ROWS],
    np.tile(ROWS.reshape(128, 64)[64:], (2, 1)),
    plgpu.RefUnion(TILE, plgpu.SMEM((128, 128), F16)),
)
def test_elements_of_other_widths_and_bitcasts_of_members(x, o, union):
    wide, narrow = union
    wide[...] = x[...]
    narrow[0:64] = narrow[64:128]
    o[...] = narrow.bitcast(F32)[...]


INT4 = np.arange(32 * 128).reshape(32, 128) % 16 - 8


@everywhere.gives(
    [INT4.astype(jnp.int4)],
    (INT4[:, ::2] & 15 | (INT4[:, 1::2] & 15) << 4).astype(np.uint8),
    plgpu.RefUnion(plgpu.SMEM((32, 128), jnp.int4), plgpu.SMEM((32, 64), "u1")),
)
def test_elements_of_four_bits(x, o, union):
    packed, raw = union
    packed[...] = x[...]
    o[...] = raw[...]


@everywhere.gives(
    [ROWS],
    ROWS[0, 1:2].view(np.int32),
    plgpu.RefUnion(plgpu.SMEM((), F32), plgpu.SMEM((), I32)),
)
def test_single_elements_share_memory(x, o, union):
    number, word = union
    number[...] = x[0, 1]
    o[0] = word[...]


NARROW = plgpu.SMEM((64, 128), F16)


@everywhere.gives(
    [ROWS % 128],
    (ROWS % 128 * 2).astype(np.float16),
    plgpu.RefUnion([TILE], [NARROW, NARROW]),
    plgpu.Barrier(),
)
def test_copies_into_one_alternative_and_out_of_another(x, o, union, barrier):
    (tile,), (result, _) = union
    plgpu.copy_gmem_to_smem(x, tile, barrier)
    plgpu.barrier_wait(barrier)
    value = tile[...] * 2
    result[...] = value.astype(F16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(result, o)
    plgpu.wait_smem_to_gmem(0)


@pytest.mark.parametrize("inferred", [False, True])
def test_operands_of_a_product_make_way_for_its_result(inferred):
    def body(a, b, o, union, barrier):
        (left, right), result = union
        plgpu.copy_gmem_to_smem(a, left, barrier)
        plgpu.copy_gmem_to_smem(b, right, barrier)
        plgpu.barrier_wait(barrier)

        def multiply(acc):
            plgpu.wgmma(acc, left, right)
            plgpu.wgmma_wait(0)
            return acc[...]

        result[...] = plgpu.run_scoped(multiply, ACC)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, o)
        plgpu.wait_smem_to_gmem(0)

    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    tile = plgpu.SMEM((64, 64), F16, transforms=() if inferred else transforms)
    union = plgpu.RefUnion((tile, tile), plgpu.SMEM((64, 64), F32))
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 4, (64, 64)).astype(np.float16) for _ in "ab")
    semantics = [plgpu.LoweringSemantics.Warpgroup] if inferred else BOTH
    everywhere.run(
        body, [a, b], a.astype(np.float32) @ b.astype(np.float32),
        union, plgpu.Barrier(num_arrivals=2), semantics=semantics, executed=semantics,
    )  # fmt: skip


@everywhere.gives([ROWS], 2 * ROWS + 3)
def test_unions_in_scopes_by_name_through_jit_and_loops(x, o):
    def scope(before, *, union):
        @jax.jit
        def add(refs, amount):
            floats, _ = refs
            floats[...] = floats[...] + amount

        union[0][...] = x[...]
        before[...] = x[...]
        plgpu.loop(0, 3)(lambda step: add(union, 1.0))
        o[...] = union[0][...] + before[...]

    other = plgpu.SMEM((128,), I32)
    union = plgpu.RefUnion(TILE, {"a": other, "b": other})
    plgpu.run_scoped(scope, TILE, union=union)


WGS = {"num_threads": 2, "thread_name": "wg"}


@everywhere.gives(
    [ROWS], ROWS.view(np.int32), two(), plgpu.Barrier(num_arrivals=2), **WGS
)
def test_warpgroups_take_turns_with_alternatives(x, o, union, written):
    wg = lax.axis_index("wg")
    floats, words = union
    plgpu.when(wg == 0)(lambda: floats.set(x[...]))
    plgpu.barrier_arrive(written)
    plgpu.barrier_wait(written)
    plgpu.when(wg == 1)(lambda: o.set(words[...]))


@pytest.mark.offline
def test_it_compiles_to_shared_addresses_offline():
    def body(x, o, union):
        a, b = union
        a[...] = x[...]
        o[...] = b[...]

    make = everywhere.kernel(body, ROWS, plgpu.RefUnion(TILE, TILE))
    (report,) = offline.compile(make(False), ROWS)
    assert report.resources.smem_bytes == 64 * 128 * 4
    assert "st.shared" in report.ptx


# --- mistakes -------------------------------------------------------------------------


@refused_by(run, scratch_types=[two(F32, F32)])
def test_a_copy_of_what_was_stored_through_another_member_needs_a_fence(x, o, union):
    floats, others = union
    floats[...] = x[...]
    plgpu.copy_smem_to_gmem(others, o)  # HERE
    plgpu.wait_smem_to_gmem(0)


@refused_by(
    run,
    scratch_types=[two(F32, F32), plgpu.Barrier()],
    compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
)
def test_a_copy_over_what_was_stored_through_another_member_needs_one_too(
    x, o, union, barrier
):
    floats, others = union
    floats[...] = x[...]
    plgpu.copy_gmem_to_smem(x, others, barrier)  # HERE
    plgpu.barrier_wait(barrier)
    o[...] = others[...]


@refused_by(run, scratch_types=[two()])
def test_a_member_is_busy_while_a_copy_reads_another(x, o, union):
    floats, words = union
    floats[...] = x[...]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(floats, o)
    words[...] = jnp.zeros((64, 128), I32)  # HERE
    plgpu.wait_smem_to_gmem(0)


@refused_by(run, scratch_types=[two(), plgpu.Barrier()])
def test_a_copy_into_a_member_is_waited_for_before_another_is_used(
    x, o, union, barrier
):
    floats, words = union
    plgpu.copy_gmem_to_smem(x, floats, barrier)
    words[3] = jnp.zeros((128,), I32)  # HERE
    plgpu.barrier_wait(barrier)
    o[...] = floats[...]


@pytest.mark.parametrize("rows", [(0, 8), (60, 64)])
def test_two_members_in_use_at_once_are_a_race(rows):
    def body(x, o, union):
        wg = lax.axis_index("wg")
        floats, words = union

        @plgpu.when(wg == 0)
        def _():
            floats[...] = x[...]
            o[...] = floats[...]

        @plgpu.when(wg == 1)
        def _():
            words[rows[0] : rows[1]] = jnp.ones((rows[1] - rows[0], 128), I32)

    with pytest.raises(errors.RaceError, match="in a union with"):
        run(body, scratch_types=[two()], **WGS)


def test_members_that_share_no_byte_do_not_conflict():
    def body(x, o, union):
        wg = lax.axis_index("wg")
        floats, (_, more) = union

        @plgpu.when(wg == 0)
        def _():
            floats[:32] = x[:32]
            o[:32] = floats[:32]

        @plgpu.when(wg == 1)
        def _():
            more[...] = x[32:]
            o[32:] = more[...]

    union = plgpu.RefUnion(TILE, [plgpu.SMEM((32, 128), I32), HALF])
    result = run(body, scratch_types=[union], **WGS)
    np.testing.assert_array_equal(result, numbers())


@refused_by(run, scratch_types=[two()])
def test_bytes_that_nobody_wrote_have_no_value(x, o, union):
    floats, words = union
    words[:60] = jnp.zeros((60, 128), I32)
    o[...] = floats[...]  # HERE


@refused_by(
    run,
    out=jax.ShapeDtypeStruct((64, 64), F32),
    scratch_types=[
        plgpu.RefUnion(plgpu.SMEM((64, 64), F32), plgpu.SMEM((64, 128), F16))
    ],
)
def test_an_element_of_which_half_was_written_has_no_value(x, o, union):
    floats, halves = union
    halves[:, 1:] = jnp.zeros((64, 127), F16)
    o[...] = floats[...]  # HERE


@refused_by(
    run,
    out=jax.ShapeDtypeStruct((64, 64), jnp.int16),
    scratch_types=[
        plgpu.RefUnion(plgpu.SMEM((64, 64), F16), plgpu.SMEM((64, 64), jnp.int16))
    ],
)
def test_bytes_in_an_inferred_layout_mean_nothing_to_other_members(x, o, union):
    tile, words = union
    tile[...] = jnp.zeros((64, 64), F16)
    plgpu.commit_smem()

    def multiply(acc):
        plgpu.wgmma(acc, tile, tile)
        plgpu.wgmma_wait(0)

    plgpu.run_scoped(multiply, ACC)
    o[...] = words[...]  # HERE


def test_layouts_are_inferred_under_warpgroup_semantics_alone():
    def body(o, tile):
        plgpu.run_scoped(lambda acc: plgpu.wgmma(acc, tile[0], tile[0]), ACC)

    tile = plgpu.SMEM((64, 64), F16)
    kernel = everywhere.kernel(body, ROWS, plgpu.RefUnion(tile, tile))(None)
    (eqn,) = jax.make_jaxpr(kernel)().eqns
    found = [inferred_members(eqn.params["jaxpr"], semantics) for semantics in BOTH]
    assert list(map(len, found)) == [semantics is Warpgroup for semantics in BOTH]


# --- refusals -------------------------------------------------------------------------

TMEM = plgpu.TMEM((128, 64), F32)
ALTERNATIVES = {
    "a barrier": (TILE, plgpu.Barrier()),
    "an accumulator": (TILE, ACC),
    "nothing": (TILE, None),
    "a type": (TILE, F32),
    "no alternative": (),
    "an alternative without arrays": (TILE, []),
    "two spaces": (TILE, TMEM),
    "GMEM": (plgpu.GMEM((8,), F32),),
    "TMEM of 128 and of 64 rows": (TMEM, plgpu.TMEM((64, 64), F32)),
    "TMEM of a CTA and of a pair": (TMEM, plgpu.TMEM((128, 64), F32, collective=True)),
}


@pytest.mark.parametrize("trees", ALTERNATIVES.values(), ids=ALTERNATIVES)
@refused
def test_alternatives_are_arrays_of_one_memory(trees):
    plgpu.RefUnion(*trees)  # HERE


@refused_by(run, scratch_types=[two()])
def test_a_union_is_not_written(x, o, union):
    union[...] = x[...]  # HERE


@refused_by(run, scratch_types=[two()])
def test_a_union_is_not_read(x, o, union):
    o[...] = union[...]  # HERE
