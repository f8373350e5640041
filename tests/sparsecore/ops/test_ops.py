# SPDX-License-Identifier: Apache-2.0
"""The ready kernels: in the emulator, as emitted modules, as libtpu compiles them."""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu import sparsecore as plsc
from pallas_gpu.arch import tpu
from pallas_gpu.sparsecore import ops
from pallas_gpu.sparsecore.check import budgets
from tests.support import tiers
from tests.support.refusal import refused
from tests.support.sparsecore import emitted, whole
from tests.support.sparsecore.modules import CHIPS, needs_libtpu
from tests.support.sparsecore.op_cases import ADD_F32, CASES, MADE


def _arguments(name):
    return CASES[name].args(np.random.default_rng(len(name)))


def _require_equal(name, got, arguments):
    expected = CASES[name].expected(*arguments)
    for x, y in zip(jax.tree.leaves(got), expected, strict=True):
        x = np.asarray(x)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(x.astype(np.float64), y.astype(np.float64))


@pytest.mark.parametrize("name", CASES)
def test_equals_numpy_in_every_schedule(name):
    arguments = _arguments(name)
    schedules = 20 if tiers.runs_everything() else 1
    interpret = plsc.InterpretParams(schedules=schedules)
    _require_equal(name, CASES[name].call(*arguments, interpret=interpret), arguments)


# With the operations of all kernels among them.
_QUICK = ("embedding_lookup with missing rows", "embedding_bag", "dispatch", "top_k")


def _skip_in_a_tier(name):
    if not tiers.runs_everything() and name not in _QUICK:
        pytest.skip("its operations are those of the others")


@pytest.mark.parametrize("name", CASES)
def test_the_emitted_module_computes_the_same(name):
    _skip_in_a_tier(name)
    arguments = _arguments(name)
    for chip in CHIPS if tiers.runs_everything() else [tiers.one_of(name, CHIPS)]:
        got = whole.interpreted(CASES[name].call, *arguments, target=chip, seed=1)
        _require_equal(name, got, arguments)


@needs_libtpu
@pytest.mark.parametrize("name", CASES)
def test_libtpu_makes_the_streams_that_were_written(name):
    _skip_in_a_tier(name)
    for chip in CHIPS if tiers.runs_everything() else [tiers.one_of(name, CHIPS)]:
        found = collections.Counter()
        for build in whole.builds(CASES[name].call, *_arguments(name), target=chip):
            streams = emitted.finished(build).program.vector.streams
            found.update(stream.kind for stream in streams)
        expected, *_ = MADE[name]
        of_chip = CHIPS.index(chip)
        assert found == {kind: counts[of_chip] for kind, counts in expected.items()}


@pytest.mark.parametrize("name", CASES)
def test_memory_is_that_of_a_few_blocks(name):
    _skip_in_a_tier(name)
    chips = CHIPS if tiers.runs_everything() else [tiers.one_of(name, CHIPS)]
    for chip in chips:
        most = collections.Counter()
        for call in whole.launches(CASES[name].call, *_arguments(name), target=chip):
            most |= budgets.used(call.jaxpr, call.compiler_params.tiling)
        _, *expected = MADE[name]
        of_chip = [words[CHIPS.index(chip)] for words in expected]
        assert [most[plsc.VMEM], most[plsc.VMEM_SHARED]] == of_chip


@needs_libtpu
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.large])
def test_a_vector_takes_a_bundle(name):
    _skip_in_a_tier(name)
    case = CASES[name]
    for chip in CHIPS if tiers.runs_everything() else [tiers.one_of(name, CHIPS)]:
        builds = whole.builds(case.call, *case.large(), target=chip)
        found = [x for b in builds for x in emitted.finished(b).program.vector.loops]
        loops = [loop for loop in found if loop.loads >= 4]
        assert max(loop.bundles_per_vector for loop in loops) <= case.bundles
        assert all(len(loop.bundles) <= 1.25 * loop.slot_bound for loop in loops)
        if case.bundles > 1.25:
            assert max(loop.slot_bound / loop.loads for loop in loops) > 1.25


@needs_libtpu
@pytest.mark.parametrize("width, copies", [(128, False), (384, False), (64, True)])
def test_xla_copies_a_table_only_if_its_rows_are_not_whole_tiles(width, copies):
    table = np.zeros((1000, width), np.float32)
    rows = np.zeros(512, np.int32)
    (build,) = whole.builds(ops.embedding_lookup, table, rows, target="tpu7x")
    assert (f"f32[1000,{width}]" in _copied(emitted.finished(build).hlo)) == copies


@needs_libtpu
def test_sums_of_wide_rows_compile():
    data, segments = np.zeros((512, 256), np.float32), np.zeros(512, np.int32)
    (build,) = whole.builds(
        lambda *x: ops.segment_sum(*x, 100), data, segments, target="tpu7x"
    )
    kinds = {s.kind for s in emitted.finished(build).program.vector.streams}
    assert ADD_F32 in kinds


def _copied(hlo):
    """The types of what XLA copies."""
    return [
        line.split()[2].split("{")[0] for line in hlo.splitlines() if " copy(" in line
    ]


def test_the_derivative_of_a_lookup_adds_rows():
    rng = np.random.default_rng(0)
    table = rng.integers(-9, 9, (40, 16)).astype(np.float32)
    rows = rng.integers(0, 40, 100).astype(np.int32)
    weights = rng.integers(-9, 9, (100, 16)).astype(np.float32)

    def loss(table):
        return jnp.sum(ops.embedding_lookup(table, rows) * weights)

    expected = np.zeros((40, 16), np.float32)
    np.add.at(expected, rows, weights)
    np.testing.assert_array_equal(jax.grad(loss)(table), expected)


def test_sums_that_do_not_fit_are_made_part_after_part(monkeypatch):
    small = dataclasses.replace(tpu.TPU7X, pool_words=16 * 4096)
    monkeypatch.setitem(tpu.TARGETS, "tpu7x", small)
    data = np.arange(200 * 32, dtype=np.int32).reshape(200, 32)
    segments = np.arange(200, dtype=np.int32) * 7
    sums = ops.segment_sum(data, segments, 1400, target="tpu7x")
    expected = np.zeros((1400, 32), np.int32)
    expected[segments] = data
    np.testing.assert_array_equal(sums, expected)
    (launch,) = whole.launches(
        lambda *x: ops.segment_sum(*x, 1400), data, segments, target="tpu7x"
    )
    assert "length=2" in str(launch.jaxpr)


# Most of them are the first or the last of all, as padding is.
_EXTREME = {
    np.float32: [np.inf, -np.inf, np.nan, -np.nan, -0.0, 0.0, 1.5, -1e-45],
    np.int32: [2**31 - 1, -(2**31), 0, -1],
}


@pytest.mark.parametrize("dtype", _EXTREME)
@pytest.mark.parametrize("columns", [5, 40, 60, 104])
def test_no_key_or_value_is_lost_to_padding(dtype, columns):
    if not tiers.runs_everything() and (dtype, columns) != (np.float32, 60):
        pytest.skip("the padding of 60 columns is in a register that turns")
    for seed in range(5 if tiers.runs_everything() else 1):
        rng = np.random.default_rng(seed)
        keys = rng.choice(np.array(_EXTREME[dtype], dtype), (17, columns))
        places = np.tile(np.arange(columns, dtype=np.int32), (17, 1))

        def require(found, at, expected, keys=keys):
            at = np.asarray(at)
            np.testing.assert_array_equal(found, expected)
            np.testing.assert_array_equal(np.take_along_axis(keys, at, 1), expected)
            assert all(len(set(row)) == len(row) for row in at.tolist())

        ascending = np.sort(keys, 1)
        np.testing.assert_array_equal(ops.sort(keys), ascending)
        require(*ops.sort(keys, places), ascending)
        require(*ops.sort(keys, places, descending=True), ascending[:, ::-1])
        require(*ops.top_k(keys, 4), ascending[:, :-5:-1])


def test_under_jit_and_vmap():
    table = np.arange(80 * 8, dtype=np.float32).reshape(80, 8)
    rows = np.arange(48, dtype=np.int32).reshape(3, 16)
    found = jax.jit(jax.vmap(ops.embedding_lookup, in_axes=(None, 0)))(table, rows)
    np.testing.assert_array_equal(found, table[rows])


def test_nothing_to_look_up():
    none = np.zeros(0, np.int32)
    assert ops.embedding_lookup(jnp.ones((4, 8)), none).shape == (0, 8)


MISTAKES = {
    "rows of a matrix": lambda: ops.embedding_lookup(
        np.ones((4, 8), np.float32), np.zeros((2, 2), np.int32)
    ),
    "a table of vectors": lambda: ops.embedding_lookup(
        np.ones(4, np.float32), np.zeros(2, np.int32)
    ),
    "rows that do not fit": lambda: ops.embedding_lookup(
        np.ones((4, 100_000), np.float32), np.zeros(2, np.int32)
    ),
    "sums of bf16": lambda: ops.segment_sum(
        jnp.ones((4, 8), jnp.bfloat16), np.zeros(4, np.int32), 3
    ),
    "a segment too few": lambda: ops.segment_sum(
        np.ones((4, 8), np.float32), np.zeros(3, np.int32), 3
    ),
    "an expert too few": lambda: ops.dispatch(
        np.ones((4, 8), np.float32), np.zeros(3, np.int32), 2, 8
    ),
    "keys and values": lambda: ops.sort(
        np.ones((4, 8), np.float32), np.ones((4, 9), np.float32)
    ),
    "more than there are": lambda: ops.top_k(np.ones((4, 8), np.float32), 9),
    "a block of 100": lambda: ops.deduplicate(np.zeros(4, np.int32), block=100),
    "too many bins": lambda: ops.histogram(np.zeros(4, np.int32), 1_000_000),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@refused
def test_mistakes(mistake):
    MISTAKES[mistake]()
