# SPDX-License-Identifier: Apache-2.0
"""The interpreter of modules: hand-written ones equal NumPy, and mutants do not."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu.sparsecore.runtime import serialize
from tests.support.sparsecore import interpreter, modules

ROWS, WIDTH, COUNT = 64, 16, 32
SEEDS = range(6)
_RNG = np.random.default_rng(0)
TABLE = _RNG.standard_normal((ROWS, WIDTH), np.float32)
INDICES = _RNG.integers(0, ROWS, COUNT, np.int32)
UPDATES = _RNG.integers(-8, 8, (COUNT, WIDTH)).astype(np.float32)
TARGETS = _RNG.integers(0, 16, COUNT, np.int32)
SUMS = np.zeros((ROWS, WIDTH), np.float32)
np.add.at(SUMS, TARGETS, UPDATES)


def _execute(text: str, *inputs: np.ndarray, seed: int = 0) -> np.ndarray:
    (out,) = interpreter.execute(serialize.parse(text), *inputs, seed=seed)
    return out


GATHER = modules.gather(ROWS, WIDTH, 16 * 8, 16)
MANY = _RNG.integers(0, ROWS, 16 * 8, np.int32)
SCATTER = modules.scatter_add(ROWS, WIDTH, 16 * 8, 16)
MANY_UPDATES = _RNG.integers(-8, 8, (16 * 8, WIDTH)).astype(np.float32)
MANY_SUMS = np.zeros((ROWS, WIDTH), np.float32)
np.add.at(MANY_SUMS, MANY, MANY_UPDATES)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gather_equals_numpy(seed):
    out = _execute(GATHER, TABLE, MANY, seed=seed)
    np.testing.assert_array_equal(out, 2 * TABLE[MANY])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_scatter_add_with_duplicates_equals_numpy(seed):
    out = _execute(SCATTER, MANY_UPDATES, MANY, seed=seed)
    np.testing.assert_array_equal(out, MANY_SUMS)


def test_prefix_sums_of_scalar_subcores_equal_numpy():
    x = _RNG.integers(0, 100, (2, 128)).astype(np.int32)
    out = _execute(modules.prefix_sum(128, 2), x)
    np.testing.assert_array_equal(out, np.cumsum(x, axis=1))


def _without(text: str, word: str, occurrence: int = 0) -> str:
    lines = text.splitlines()
    at = [i for i, line in enumerate(lines) if word in line][occurrence]
    return "\n".join([*lines[:at], *lines[at + 1 :]])


_MUTANTS = {
    "without the wait for the indices": _without(SCATTER, "tpu.wait_dma2", 2),
    "without the wait for the zeros": _without(SCATTER, "tpu.wait_dma2", 0),
    "without the wait for the sums": _without(SCATTER, "tpu.wait_indirect_dma"),
    "without the first barrier": _without(SCATTER, "tpu.barrier", 0),
    "without the second barrier": _without(SCATTER, "tpu.barrier", 1),
    "overwriting": SCATTER.replace("add = true", "add = false"),
    "without a copy": _without(SCATTER, "tpu.enqueue_dma", 1),
    "leaving the array": SCATTER.replace(
        "%at = arith.muli %s, %updates", "%at = arith.muli %mine, %updates"
    ).replace("%mine = arith.constant 4", "%mine = arith.constant 400"),
}


@pytest.mark.parametrize("mutant", _MUTANTS)
def test_a_mutant_is_seen_in_some_order(mutant):
    text = _MUTANTS[mutant]
    assert text != SCATTER
    for seed in range(12):
        try:
            out = _execute(text, MANY_UPDATES, MANY, seed=seed)
        except interpreter.ModuleError:
            return
        if not np.array_equal(out, MANY_SUMS):
            return
    pytest.fail("nobody saw it")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "    tpu.wait_dma2 semaphore(%sem : SEM) src(%x : X) dst(%buf : BUF)",
            "hangs",
        ),
        (
            "    %z = arith.cmpi eq, %s, %c0 : i32\n    scf.if %z {\n"
            "      tpu.barrier barrier_id(%i0)\n    }",
            "hangs",
        ),
        (
            "    tpu.enqueue_dma source(%x : X) target(%buf : BUF) "
            "target_semaphore(%sem : SEM)",
            "never awaited|at the end",
        ),
        (
            "    %one = arith.constant 1 : i32\n"
            "    %p = tpu.memref_slice %x[%one] : X -> PART\n"
            "    %q = tpu.memref_slice %buf[%c0] : BUF -> BUFPART\n"
            "    tpu.enqueue_dma source(%p : PART) target(%q : BUFPART) "
            "target_semaphore(%sem : SEM)",
            "not a multiple of 32",
        ),
    ],
)
def test_what_a_kernel_may_not_do_is_an_error(body, reason):
    types = {
        "BUFPART": modules.ref([64], "f32", modules.VMEM),
        "PART": modules.ref([64], "f32", modules.HBM),
        "BUF": modules.ref([128], "f32", modules.VMEM),
        "SEM": modules.SEM,
        "X": modules.ref([128], "f32", modules.HBM),
    }
    for name, t in types.items():
        body = body.replace(f": {name}", f": {t}").replace(f"-> {name}", f"-> {t}")
    text = modules.through(body + "\n")
    x = np.zeros(128, np.float32)
    with pytest.raises(interpreter.ModuleError, match=reason):
        _execute(text, x, seed=1)
