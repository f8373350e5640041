# SPDX-License-Identifier: Apache-2.0
"""Unions: scratch arrays that share memory, everywhere with the same bytes."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, offline
from tests.support import everywhere
from tests.support.entry_kernels import numbers, run
from tests.support.refusal import refused, refused_by
from tests.support.semantics import BOTH

F16, F32, I32 = jnp.float16, jnp.float32, jnp.int32
ROWS = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
OUT = jax.ShapeDtypeStruct((64, 128), F32)
WORDS = jax.ShapeDtypeStruct((64, 128), I32)
SWIZZLED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


def of(body, *scratch, out=OUT, **options):
    """Returns `make` for a kernel with one CTA."""
    return everywhere.kernel(body, out, *scratch, **options)


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


@pytest.mark.smoke
def test_a_union_unpacks_to_its_alternatives():
    def body(x, o, union):
        whole, (top, bottom) = union
        whole[...] = x[...]
        value = whole[...]
        top[...] = value[:32] * 2
        bottom[...] = value[32:] * 3
        o[:32] = union[1][0][...]
        o[32:] = bottom[...]

    half = plgpu.SMEM((32, 128), F32)
    make = of(body, plgpu.RefUnion(plgpu.SMEM((64, 128), F32), [half, half]))
    everywhere.check(make, [ROWS], ROWS * np.repeat([[2], [3]], 32, axis=0))


def nested(after=True):
    """Tiles of 32 rows: one and two more; or one, and four of 8 in place of them."""
    row = plgpu.SMEM((32, 128), F32)
    few = [plgpu.SMEM((8, 128), F32) for _ in range(4)]
    inner = plgpu.RefUnion(row, few)
    return plgpu.RefUnion(
        plgpu.SMEM((96, 128), F32), [row, inner, row] if after else inner
    )


def test_unions_nest():
    def body(x, o, union):
        whole, (top, (middle, quarters), bottom) = union
        whole[:64] = x[...]
        whole[64:] = x[:32] + 1
        value = middle[...]
        for i, quarter in enumerate(quarters):
            quarter[...] = value[8 * i : 8 * i + 8] * (i + 1)
        o[:32] = top[...] + bottom[...]
        o[32:] = whole[32:64]

    scale = np.repeat(np.arange(1, 5), 8)[:, None]
    expected = np.concatenate([2 * ROWS[:32] + 1, ROWS[32:] * scale])
    everywhere.check(of(body, nested()), [ROWS], expected)


def test_an_array_behind_an_inner_union_lies_behind_its_longest_alternative():
    def body(o, union, after):
        _, (top, (middle, quarters), bottom) = union
        bottom[...] = jnp.full((32, 128), 1, F32)
        after[...] = jnp.full((32, 128), 2, F32)
        for quarter in quarters:
            quarter[...] = jnp.full((8, 128), 3, F32)
        top[...] = jnp.full((32, 128), 4, F32)
        o[:32] = bottom[...] + after[...]
        o[32:] = middle[...] + top[...]

    make = of(body, nested(), plgpu.SMEM((32, 128), F32))
    expected = np.repeat([[3], [7]], 32, axis=0) * np.ones((64, 128), np.float32)
    everywhere.check(make, [], expected)


def test_a_race_between_members_of_an_inner_union_is_reported():
    def body(x, o, union, full):
        _, (middle, quarters) = union
        plgpu.copy_gmem_to_smem(x.at[:32], middle, full)
        quarters[3][...] = x[:8]
        plgpu.barrier_wait(full)
        o[...] = x[...]

    make = of(body, nested(after=False), plgpu.Barrier())
    with pytest.raises(errors.RaceError):
        make(plgpu.InterpretParams())(ROWS)


def test_bytes_lie_where_transforms_say():
    def body(x, o, union):
        tiled, plain = union
        tiled[...] = x[...]
        o[...] = plain[...]

    union = plgpu.RefUnion(
        plgpu.SMEM((64, 128), F32, transforms=SWIZZLED), plgpu.SMEM((64, 128), I32)
    )
    make = of(body, union, out=WORDS)
    expected = swizzled_bytes(ROWS).view(np.int32).reshape(64, 128)
    everywhere.check(make, [ROWS], expected)


def test_a_part_that_is_written_changes_its_bytes_alone():
    def body(x, o, union):
        floats, words = union
        floats[...] = x[...]
        words[8:16] = jnp.zeros((8, 128), I32)
        floats[40:48] = floats[40:48] + 1
        o[...] = words[...]

    make = of(body, two(), out=WORDS)
    expected = ROWS.copy()
    expected[8:16] = 0
    expected[40:48] += 1
    everywhere.check(make, [ROWS], expected.view(np.int32))


def test_elements_of_other_widths_and_bitcasts_of_members():
    def body(x, o, union):
        wide, narrow = union
        wide[...] = x[...]
        narrow[0:64] = narrow[64:128]
        o[...] = narrow.bitcast(F32)[...]

    union = plgpu.RefUnion(plgpu.SMEM((64, 128), F32), plgpu.SMEM((128, 128), F16))
    make = of(body, union, out=jax.ShapeDtypeStruct((128, 64), F32))
    x = ROWS.reshape(128, 64)
    everywhere.check(make, [ROWS], np.concatenate([x[64:], x[64:]]))


def test_elements_of_four_bits():
    def body(x, o, union):
        packed, raw = union
        packed[...] = x[...]
        o[...] = raw[...]

    union = plgpu.RefUnion(plgpu.SMEM((32, 128), jnp.int4), plgpu.SMEM((32, 64), "u1"))
    make = of(body, union, out=jax.ShapeDtypeStruct((32, 64), jnp.uint8))
    x = np.arange(32 * 128).reshape(32, 128) % 16 - 8
    codes = x & 15
    expected = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    everywhere.check(make, [x.astype(jnp.int4)], expected)


def test_single_elements_share_memory():
    def body(x, o, union):
        number, word = union
        number[...] = x[0, 1]
        o[0] = word[...]

    union = plgpu.RefUnion(plgpu.SMEM((), F32), plgpu.SMEM((), I32))
    make = of(body, union, out=jax.ShapeDtypeStruct((1,), I32))
    everywhere.check(make, [ROWS], ROWS[0, 1:2].view(np.int32))


def test_copies_into_one_alternative_and_out_of_another():
    def body(x, o, union, barrier):
        (tile,), (result, _) = union
        plgpu.copy_gmem_to_smem(x, tile, barrier)
        plgpu.barrier_wait(barrier)
        value = tile[...] * 2
        result[...] = value.astype(F16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, o)
        plgpu.wait_smem_to_gmem(0)

    half = plgpu.SMEM((64, 128), F16)
    union = plgpu.RefUnion([plgpu.SMEM((64, 128), F32)], [half, half])
    out = jax.ShapeDtypeStruct((64, 128), F16)
    make = of(body, union, plgpu.Barrier(), out=out)
    x = ROWS % 128
    everywhere.check(make, [x], (x * 2).astype(np.float16))


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

        result[...] = plgpu.run_scoped(multiply, plgpu.ACC((64, 64)))
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


def test_unions_in_scopes_by_name_through_jit_and_loops():
    def body(x, o):
        def scope(before, *, union):
            @jax.jit
            def add(refs, amount):
                floats, _ = refs
                floats[...] = floats[...] + amount

            union[0][...] = x[...]
            before[...] = x[...]

            def turn(step, carry):
                add(union, 1.0)
                return carry

            lax.fori_loop(0, 3, turn, None)
            o[...] = union[0][...] + before[...]

        other = plgpu.SMEM((128,), I32)
        plgpu.run_scoped(
            scope,
            plgpu.SMEM((64, 128), F32),
            union=plgpu.RefUnion(plgpu.SMEM((64, 128), F32), {"a": other, "b": other}),
        )

    everywhere.check(of(body), [ROWS], 2 * ROWS + 3)


def test_warpgroups_take_turns_with_alternatives():
    def body(x, o, union, written):
        wg = lax.axis_index("wg")
        floats, words = union

        @plgpu.when(wg == 0)
        def _():
            floats[...] = x[...]

        plgpu.barrier_arrive(written)
        plgpu.barrier_wait(written)

        @plgpu.when(wg == 1)
        def _():
            o[...] = words[...]

    make = of(
        body, two(), plgpu.Barrier(num_arrivals=2), out=WORDS, num_threads=2,
        thread_name="wg",
    )  # fmt: skip
    everywhere.check(make, [ROWS], ROWS.view(np.int32))


@pytest.mark.offline
def test_it_compiles_to_shared_addresses_offline():
    def body(x, o, union):
        a, b = union
        a[...] = x[...]
        o[...] = b[...]

    tile = plgpu.SMEM((64, 128), F32)
    (report,) = offline.compile(of(body, plgpu.RefUnion(tile, tile))(False), ROWS)
    assert report.resources.smem_bytes == 64 * 128 * 4
    assert "st.shared" in report.ptx


# --- mistakes -------------------------------------------------------------------------


@contextlib.contextmanager
def reported(error, *texts):
    """Expects an error whose report has all texts, and names the line `# HERE`."""
    with pytest.raises(error) as info:
        yield
    report = str(info.value)
    assert [text for text in (*texts, "# HERE") if text not in report] == []


@refused_by(lambda body: run(body, scratch_types=[two(F32, F32)]))
def test_a_copy_of_what_was_stored_through_another_member_needs_a_fence(x, o, union):
    floats, others = union
    floats[...] = x[...]
    plgpu.copy_smem_to_gmem(others, o)  # HERE
    plgpu.wait_smem_to_gmem(0)


def test_a_copy_over_what_was_stored_through_another_member_needs_one_too():
    def body(x, o, union, barrier):
        floats, others = union
        floats[...] = x[...]
        plgpu.copy_gmem_to_smem(x, others, barrier)  # HERE
        plgpu.barrier_wait(barrier)
        o[...] = others[...]

    with reported(errors.RaceError, "overwrites SMEM float32", "commit_smem()"):
        run(body, scratch_types=[two(F32, F32), plgpu.Barrier()])


@refused_by(lambda body: run(body, scratch_types=[two()]))
def test_a_member_is_busy_while_a_copy_reads_another(x, o, union):
    floats, words = union
    floats[...] = x[...]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(floats, o)
    words[...] = jnp.zeros((64, 128), I32)  # HERE
    plgpu.wait_smem_to_gmem(0)


def test_a_copy_into_a_member_is_waited_for_before_another_is_used():
    def body(x, o, union, barrier):
        floats, words = union
        plgpu.copy_gmem_to_smem(x, floats, barrier)
        words[3] = jnp.zeros((128,), I32)  # HERE
        plgpu.barrier_wait(barrier)
        o[...] = floats[...]

    with reported(errors.RaceError, "before the copy from input 0", "barrier_wait"):
        run(body, scratch_types=[two(), plgpu.Barrier()])


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
        run(body, scratch_types=[two()], num_threads=2, thread_name="wg")


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

    union = plgpu.RefUnion(
        plgpu.SMEM((64, 128), F32),
        [plgpu.SMEM((32, 128), I32), plgpu.SMEM((32, 128), F32)],
    )
    result = run(body, scratch_types=[union], num_threads=2, thread_name="wg")
    np.testing.assert_array_equal(result, numbers())


@refused_by(lambda body: run(body, scratch_types=[two()]))
def test_bytes_that_nobody_wrote_have_no_value(x, o, union):
    floats, words = union
    words[:60] = jnp.zeros((60, 128), I32)
    o[...] = floats[...]  # HERE


def test_an_element_of_which_half_was_written_has_no_value():
    def body(x, o, union):
        floats, halves = union
        halves[:, 1:] = jnp.zeros((64, 127), F16)
        o[...] = floats[...]  # HERE

    union = plgpu.RefUnion(plgpu.SMEM((64, 64), F32), plgpu.SMEM((64, 128), F16))
    with reported(errors.UninitializedReadError, "where nothing has been written"):
        run(
            body,
            scratch_types=[union],
            out=jax.ShapeDtypeStruct((64, 64), F32),
        )


@refused
def test_bytes_in_an_inferred_layout_mean_nothing_to_other_members():
    def body(x, o, union):
        tile, words = union
        tile[...] = jnp.zeros((64, 64), F16)
        plgpu.commit_smem()

        def multiply(acc):
            plgpu.wgmma(acc, tile, tile)
            plgpu.wgmma_wait(0)

        plgpu.run_scoped(multiply, plgpu.ACC((64, 64)))
        o[...] = words[...]  # HERE

    union = plgpu.RefUnion(plgpu.SMEM((64, 64), F16), plgpu.SMEM((64, 64), jnp.int16))
    run(
        body,
        scratch_types=[union],
        out=jax.ShapeDtypeStruct((64, 64), jnp.int16),
    )


# --- refusals -------------------------------------------------------------------------

TILE = plgpu.SMEM((64, 128), F32)


@pytest.mark.parametrize(
    "member", [plgpu.Barrier(), plgpu.ACC((64, 64)), None, F32], ids=range(4)
)
@refused
def test_members_are_arrays(member):
    plgpu.RefUnion(TILE, member)  # HERE


@pytest.mark.parametrize("trees", [(), (TILE, [])], ids=["none", "an empty one"])
@refused
def test_each_alternative_has_arrays(trees):
    plgpu.RefUnion(*trees)  # HERE


@pytest.mark.parametrize(
    "members",
    [(TILE, plgpu.TMEM((128, 64), F32)), (plgpu.GMEM((8,), F32),)],
    ids=["two spaces", "GMEM"],
)
@refused
def test_members_are_all_in_smem_or_all_in_tmem(members):
    plgpu.RefUnion(*members)  # HERE


@refused
def test_members_in_tmem_have_one_number_of_rows():
    plgpu.RefUnion(plgpu.TMEM((128, 64), F32), plgpu.TMEM((64, 64), F32))  # HERE


@refused
def test_members_in_tmem_are_of_one_cta_or_of_a_pair():
    one, pair = (plgpu.TMEM((128, 64), F32, collective=c) for c in (False, True))
    plgpu.RefUnion(one, pair)  # HERE


@refused_by(lambda body: run(body, scratch_types=[two()]))
def test_a_union_is_not_written(x, o, union):
    union[...] = x[...]  # HERE


@refused_by(lambda body: run(body, scratch_types=[two()]))
def test_a_union_is_not_read(x, o, union):
    o[...] = union[...]  # HERE
