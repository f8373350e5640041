# SPDX-License-Identifier: Apache-2.0
"""SMEM, TMEM, registers and barriers of a kernel, as the planner lays them out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import arch, compiler, errors, offline, resources, types
from pallas_gpu.entry import call, trace
from tests.support.entry_kernels import f32, make, numbers
from tests.support.refusal import refused
from tests.support.semantics import BOTH, under

KIB = 1024


def tile(kib: int) -> object:
    return plgpu.SMEM((kib, 256), jnp.float32)


def plan(body, target=arch.SM_90A, warpgroups=1, **options) -> resources.Plan:
    jaxpr = jax.make_jaxpr(make(body, **options))(numbers())
    (eqn,) = (e for e in jaxpr.eqns if e.primitive is call.kernel_p)
    return resources.plan(eqn.params["jaxpr"], target, "k", 2048, warpgroups)


def copied(x, o, *scratch):
    """A body that ignores its scratch."""
    o[...] = x[...]


def offsets(result: resources.Plan | resources.Stack) -> list[tuple[int, int]]:
    return [(a.offset, a.size) for a in result.allocations]


def test_a_kernel_without_scratch_needs_no_smem():
    result = plan(copied)
    assert (result.smem_bytes, result.allocations, result.barriers) == (0, (), 0)


def test_arrays_are_aligned_for_the_widest_swizzle():
    small = plgpu.SMEM((10,), jnp.int8)
    result = plan(copied, scratch_types=[small, tile(1)])
    assert offsets(result) == [(0, 10), (1024, 1024)]


def test_barriers_lie_behind_the_arrays():
    scratch = [tile(1), plgpu.Barrier(), plgpu.Barrier(num_barriers=(2, 3))]
    result = plan(copied, scratch_types=scratch)
    assert (result.barriers, result.barrier_offset_bytes) == (7, 1024)
    assert result.smem_bytes == 1024 + 7 * 8
    assert sorted(result.barrier_slots.values()) == [0, 1]


def test_alternatives_of_a_union_start_at_one_offset():
    small = plgpu.SMEM((10,), jnp.int8)
    union = plgpu.RefUnion([small, tile(1), small], tile(2), small)
    result = plan(copied, scratch_types=[small, union, tile(1)])
    assert offsets(result) == [
        (0, 10), (1024, 10), (2048, 1024), (3072, 10), (1024, 2048), (1024, 10),
        (4096, 1024),
    ]  # fmt: skip
    assert result.smem_bytes == 5120
    assert result.table().count(" in a union ") == 5


def test_unions_in_tmem_share_columns():
    def scope(space, *declared):
        refs = [ref for n, d in enumerate(declared) for ref in d.to_refs(n)]
        variables = [jax.extend.core.Var(ref) for ref in refs]
        placed, top = resources.place(space, variables, 4)
        return [(a.offset, a.size) for a in placed], top

    wide, narrow = (plgpu.TMEM((128, n), jnp.float32) for n in (64, 6))
    unions = [plgpu.RefUnion([narrow, narrow], wide), plgpu.RefUnion(narrow, narrow)]
    expected = [(4, 6), (12, 6), (4, 64), (68, 6), (68, 6)]
    assert scope(types.TMEM, *unions) == (expected, 74)


def test_scopes_that_follow_each_other_share_space():
    def body(x, o, a):
        plgpu.run_scoped(lambda t: None, tile(4))
        plgpu.run_scoped(lambda t: None, tile(8))
        o[...] = x[...]

    result = plan(body, scratch_types=[tile(1)])
    assert offsets(result) == [(0, KIB), (KIB, 8 * KIB)]
    assert result.arrays_bytes == 9 * KIB


def test_nested_scopes_add_up():
    def body(x, o):
        def outer(a):
            plgpu.run_scoped(lambda b: None, tile(2))

        plgpu.run_scoped(outer, tile(1))
        o[...] = x[...]

    assert offsets(plan(body)) == [(0, KIB), (KIB, 2 * KIB)]


def test_barriers_are_never_shared():
    def body(x, o):
        plgpu.run_scoped(lambda b: None, plgpu.Barrier())
        plgpu.run_scoped(lambda b: None, plgpu.Barrier())
        o[...] = x[...]

    result = plan(body)
    assert result.barriers == 2
    assert sorted(result.barrier_slots.values()) == [0, 1]


def test_each_warp_has_a_stack_above_that_of_the_block():
    def body(x, o, a):
        @plgpu.warp_map
        def _(warp_id):
            def outer(b):
                plgpu.run_scoped(lambda c: None, plgpu.SMEM((3, 256), jnp.float32))

            plgpu.run_scoped(outer, tile(1))
            plgpu.run_scoped(lambda d: None, tile(2))

        plgpu.run_scoped(lambda e: None, tile(5))
        o[...] = x[...]

    result = plan(body, scratch_types=[tile(1)])
    assert result.own("warp") == (6 * KIB, 4 * KIB, 4)
    assert result.arrays_bytes == (6 + 4 * 4) * KIB
    assert "arrays of 4 warps" in result.table()


def test_each_warpgroup_has_a_stack_for_what_its_warps_share():
    tile_of_row = plgpu.SMEM((128,), jnp.float32)

    def body(x, o, a):
        values = x[...]

        @plgpu.when(jax.lax.axis_index("wg") == 1)
        def _():
            @plgpu.warp_map
            def _(warp_id):
                plgpu.run_scoped(lambda b: b.set(values[0]), tile_of_row)

        plgpu.run_scoped(lambda c: None, tile(5), collective_axes="wg")
        o[...] = x[...]

    options = {"warpgroups": 2, "num_threads": 2, "thread_name": "wg"}
    result = plan(body, scratch_types=[tile(1)], **options)
    shared, own = result.own("warpgroup"), result.own("warp")
    assert shared == (6 * KIB, 32 * KIB, 2)
    assert own == ((6 + 64) * KIB, KIB, 8)
    assert result.arrays_bytes == (6 + 64 + 8) * KIB
    assert "arrays of 2 warpgroups" in result.table()


def test_each_warp_of_the_block_has_barriers():
    def body(x, o):
        @plgpu.warp_map
        def _(warp_id):
            plgpu.run_scoped(lambda b: None, plgpu.Barrier(num_barriers=3))

    result = plan(body, warpgroups=2, num_threads=2, thread_name="wg")
    assert result.barriers == 4 * 2 * 3


def test_a_scope_in_a_loop_is_planned_once():
    def body(x, o):
        @plgpu.loop(0, 4)
        def _(i):
            plgpu.run_scoped(lambda t, b: None, tile(2), plgpu.Barrier())

        o[...] = x[...]

    result = plan(body)
    assert (offsets(result), result.barriers) == ([(0, 2 * KIB)], 1)


@pytest.mark.parametrize("warpgroups", [1, 2])
def test_every_warpgroup_has_scratch_once_the_kernel_uses_it(warpgroups):
    result = plan(copied, warpgroups=warpgroups)
    assert (result.scratch_bytes, result.smem_bytes) == (0, 0)
    used = result.with_scratch()
    assert used.scratch_bytes == used.smem_bytes == 2048 * warpgroups


@pytest.mark.parametrize(
    "size, each",
    [(0, 2048), (224 * KIB - 8, 1520), (227 * KIB - 24, 0)],
    ids=["room", "little", "none"],
)
def test_scratch_takes_what_arrays_leave(size, each):
    array = plgpu.SMEM((size,), jnp.int8) if size else tile(1)
    options = {"warpgroups": 2, "num_threads": 2, "thread_name": "wg"}
    result = plan(copied, scratch_types=[array, plgpu.Barrier()], **options)
    assert result.scratch_room_bytes == 2 * each
    assert result.with_scratch().smem_bytes <= arch.SM_90A.smem_bytes_per_block


def test_scratch_that_the_author_has_not_set_may_grow():
    assert plan(copied, warpgroups=2).scratch_rooms_bytes == (4 * KIB,)
    jaxpr = jax.make_jaxpr(make(copied))(numbers())
    (eqn,) = (e for e in jaxpr.eqns if e.primitive is call.kernel_p)
    free = resources.plan(eqn.params["jaxpr"], arch.SM_90A, "k", None, 2)
    # Each warpgroup has a multiple of 16 bytes.
    limit = arch.SM_90A.smem_bytes_per_block // 32 * 32
    assert free.scratch_rooms_bytes == (4 * KIB, 16 * KIB, 64 * KIB, limit)


@pytest.mark.parametrize("semantics", BOTH)
def test_a_kernel_has_scratch_only_if_its_code_uses_it(semantics):
    def within_warps(x, o):
        o[...] = x[...]

    def across_warps(x, o):
        o[...] = x[...] - x[...].max()

    for body, expected in ((within_warps, 0), (across_warps, 2048)):
        function = under(semantics, make(body))
        (params,) = offline.kernels_called(function, (numbers(),), arch.SM_90A)
        assert compiler.lower(params, arch.SM_90A).plan.scratch_bytes == expected


def test_the_budget_is_met_to_the_byte():
    # 16 bytes are those of the static variable by which dynamic SMEM is addressed.
    fits = plgpu.SMEM((227 * KIB - 16 - 8,), jnp.int8)
    result = plan(copied, scratch_types=[fits, plgpu.Barrier()])
    assert result.smem_bytes == arch.SM_90A.smem_bytes_per_block
    with pytest.raises(errors.OutOfResources):
        plan(copied, scratch_types=[fits, plgpu.Barrier(num_barriers=2)])


def test_barriers_are_aligned_words():
    odd = plgpu.SMEM((13,), jnp.int8)
    assert plan(copied, scratch_types=[odd, plgpu.Barrier()]).barrier_offset_bytes == 16


def test_the_table_lists_every_allocation_in_bytes():
    def body(x, o, a, b, c):
        o[...] = x[...] - x[...].max()

    scratch = [tile(100), plgpu.SMEM((64, 128), jnp.float16), plgpu.Barrier()]
    result = plan(body, scratch_types=scratch).with_scratch()
    rows = resources.table(result).splitlines()
    assert [row.split()[-1] for row in rows] == [
        "bytes", "102,400", "16,384", "8", "2,048", "120,960",
    ]  # fmt: skip
    assert len({len(row) for row in rows}) == 1


def test_over_the_budget_is_an_error_with_the_table():
    with pytest.raises(errors.OutOfResources) as info:
        plan(copied, scratch_types=[tile(100), tile(200)])
    error = info.value
    assert error.used_bytes == 300 * KIB
    assert error.limit_bytes == arch.SM_90A.smem_bytes_per_block
    assert "204,800" in error.got and "307,200" in error.got


# --- other spaces ---------------------------------------------------------------------


def plan_scopes(*nested) -> resources.Plan:
    """Plans scopes that follow each other; each is a list of nested declarations."""

    def enter(declarations):
        if declarations:
            first, *rest = declarations
            plgpu.run_scoped(lambda *_: enter(rest), first)

    def body(x):
        for declarations in nested:
            enter(declarations)

    traced, _ = trace.trace_body(body, trace.Arrays.of([f32()], []), types.Mesh(), "k")
    return resources.plan(traced.jaxpr, arch.SM_100A, "k", None, 1)


def test_scopes_stack_their_columns_and_reuse_them():
    def columns(n):
        return plgpu.TMEM((128, n), jnp.float32)

    result = plan_scopes([columns(100)], [columns(6), columns(10)], [columns(40)])
    assert offsets(result.stacks[plgpu.TMEM]) == [(0, 100)]
    assert result.tmem_columns == 128
    nested = plan_scopes([columns(6), columns(10)], [columns(10)])
    assert offsets(nested.stacks[plgpu.TMEM]) == [(0, 6), (8, 10)]
    assert nested.stacks[plgpu.TMEM].top == 18
    assert nested.tmem_columns == 32


def test_each_space_has_a_stack_of_its_own():
    accumulator = plgpu.ACC((64, 256))
    tmem = plgpu.TMEM((128, 32), jnp.float32)
    result = plan_scopes([accumulator, tile(4), tmem, accumulator], [tile(8)])
    assert offsets(result) == [(0, 8 * KIB)]
    assert offsets(result.stacks[plgpu.TMEM]) == [(0, 32)]
    assert offsets(result.stacks[plgpu.REGS]) == [(0, 128), (128, 128)]
    # The word behind them receives the address of the TMEM.
    assert result.smem_bytes == 8 * KIB + 8


def test_accumulators_that_spill_are_no_error():
    result = plan_scopes([plgpu.ACC((256, 256))])
    assert result.stacks[plgpu.REGS].top == 512 > plgpu.REGS.budget(arch.SM_100A)


@refused
def test_accumulators_that_no_sm_has_the_registers_for_are_refused():
    plan_scopes([plgpu.ACC((2560, 256))])


def test_a_kernel_without_tmem_allocates_no_columns():
    assert plan_scopes([tile(1)]).tmem_columns == 0


EXCHANGES = {
    "reversal": lambda v: jnp.flip(v, 0),
    "sum": lambda v: jnp.full((64, 128), jnp.sum(v)),
    "gather": lambda v: v[jnp.arange(64)[::-1]],
    "scatter": lambda v: v.at[3].set(0.0),
}


def almost_full(exchange, left_bytes):
    """Returns `make` for a kernel whose array leaves a few bytes of SMEM."""

    def body(x, o, s):
        o[...] = exchange(x[...])

    full = plgpu.SMEM((227 * KIB - 16 - left_bytes,), jnp.int8)
    return lambda interpret: make(body, scratch_types=[full], interpret=interpret)


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
def test_what_warps_exchange_needs_some_scratch_everywhere(exchange):
    texts = set()
    for semantics in (None, *BOTH):
        k = almost_full(exchange, 64)(plgpu.InterpretParams())
        if semantics is not None:
            k = under(semantics, almost_full(exchange, 64)(None))
        with pytest.raises(errors.OutOfResources) as info:
            k(numbers()) if semantics is None else offline.lower(k, numbers())
        texts.add((info.value.what, info.value.got))
    ((what, got),) = texts
    assert what == "kernel body: the block needs more SMEM than sm_90a has"
    assert "\nscratch " in got


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
def test_128_bytes_are_enough_for_that(exchange):
    k = almost_full(exchange, 128)
    k(plgpu.InterpretParams())(numbers())
    for semantics in BOTH:
        offline.lower(under(semantics, k(None)), numbers())


def test_what_warps_do_not_exchange_needs_none():
    k = almost_full(lambda v: v + jnp.sum(v, axis=1)[:, None], 0)
    k(plgpu.InterpretParams())(numbers())
    for semantics in BOTH:
        offline.lower(under(semantics, k(None)), numbers())
