# SPDX-License-Identifier: Apache-2.0
"""Operations on registers, each beside NumPy; and lanes that have no value."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu import sparsecore as plsc
from tests.support.refusal import refused_by
from tests.support.sparsecore.kernels import check, emulate

RNG = np.random.default_rng(0)
X = RNG.integers(-50, 50, 16).astype(np.int32)
F = RNG.integers(-50, 50, 16).astype(np.float32)
U = RNG.integers(0, 2**32, 16, dtype=np.uint32)
# A dozen of values, so that some repeat; the first lane of the mask is true.
FEW = RNG.integers(0, 5, 16).astype(np.int32)
MASK = np.array([i % 3 != 1 for i in range(16)])


def masked(x: np.ndarray, fill: Any) -> np.ndarray:
    return np.where(MASK, x, np.array(fill, x.dtype))


def counts(x: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    n = [sum(x[j] == x[i] and mask[j] for j in range(i + 1)) for i in range(16)]
    last = [mask[i] and not any(x[j] == x[i] and mask[j] for j in range(i + 1, 16))
            for i in range(16)]  # fmt: skip
    return np.where(mask, n, 0).astype(np.int32), np.array(last)


def in_order(x: np.ndarray) -> np.ndarray:
    """The lanes of the mask in order, and zeros behind them."""
    return np.concatenate([np.sort(x[MASK]), np.zeros(16 - MASK.sum(), x.dtype)])


def valid_in_order(x: Any, mask: Any) -> Any:
    keys, values, valid = plsc.sort_key_val(x, x * 2, mask=mask)
    return jnp.where(valid, keys, 0), jnp.where(valid, values, 0)


def counted(x: Any, mask: Any) -> Any:
    n, last = plsc.scan_count(x, mask)
    return jnp.where(mask, n, 0), last.astype(jnp.int32)


# What is computed of a vector and a mask, and what NumPy computes of the vector.
CASES: dict[str, tuple[np.ndarray, Callable[..., Any], Any]] = {
    "cumsum": (X, lambda x, m: plsc.cumsum(x), np.cumsum(X, dtype=np.int32)),
    "cumsum of floats": (F, lambda x, m: plsc.cumsum(x), np.cumsum(F)),
    "cumsum under a mask": (X, lambda x, m: plsc.cumsum(x, mask=m),
                            np.cumsum(masked(X, 0), dtype=np.int32)),
    "cummax": (X, lambda x, m: plsc.cummax(x), np.maximum.accumulate(X)),
    "cummax unsigned": (U, lambda x, m: plsc.cummax(x), np.maximum.accumulate(U)),
    "cummax under a mask": (F, lambda x, m: plsc.cummax(x, mask=m),
                            np.maximum.accumulate(masked(F, -np.inf))),
    "cummin under a mask": (X, lambda x, m: plsc.cummin(x, mask=m),
                            np.minimum.accumulate(masked(X, 2**31 - 1))),
    "scan_count": (FEW, counted, (counts(FEW, MASK)[0],
                                  counts(FEW, MASK)[1].astype(np.int32))),
    "population_count": (X, lambda x, m: plsc.all_reduce_population_count(x > 0),
                         np.full(16, (X > 0).sum(), np.int32)),
    "ffs": (X, lambda x, m: plsc.all_reduce_ffs(x > 20),
            np.full(16, np.argmax(X > 20), np.int32)),
    "ffs without any": (X, lambda x, m: plsc.all_reduce_ffs(x > 99),
                        np.full(16, 16, np.int32)),
    "sort": (X, lambda x, m: plsc.sort_key_val(x, x * 2), (np.sort(X), np.sort(X) * 2)),
    "stable": (FEW, lambda x, m: plsc.sort_key_val(x, jnp.arange(16)),
               (np.sort(FEW), np.argsort(FEW, kind="stable").astype(np.int32))),
    "stable, descending": (
        FEW,
        lambda x, m: plsc.sort_key_val(x, jnp.arange(16), descending=True),
        (-np.sort(-FEW), np.argsort(-FEW, kind="stable").astype(np.int32)),
    ),
    "sort under a mask": (F, valid_in_order, (in_order(F), in_order(F) * 2)),
    "the sorted mask": (
        F,
        lambda x, m: plsc.sort_key_val(x, x, mask=m)[2].astype(jnp.int32),
        np.sort(~MASK).__invert__().astype(np.int32),
    ),
    "pack and unpack": (
        F,
        lambda x, m: plsc.unpack(
            plsc.pack(x, x * 2, format=plsc.PackFormat.INTERLEAVED),
            format=plsc.PackFormat.INTERLEAVED,
        ),
        (F, F * 2),
    ),
    "bitcast": (F, lambda x, m: plsc.bitcast(x, jnp.int32), F.view(np.int32)),
    "bitcast to halves": (X, lambda x, m: plsc.bitcast(x, jnp.int16), X.view(np.int16)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_operation_computes_what_numpy_does(case):
    x, compute, expected = CASES[case]
    wanted = expected if isinstance(expected, tuple) else (expected,)
    wanted = tuple(w.astype(np.result_type(w.dtype)) for w in wanted)

    def body(x_ref, m_ref, *refs):
        outs, (v, m, r) = refs[: len(wanted)], refs[len(wanted) :][:3]
        plsc.sync_copy(x_ref, v)
        plsc.sync_copy(m_ref, m)
        results = compute(v[...], m[...] != 0)
        results = results if isinstance(results, tuple) else (results,)
        for out, result in zip(outs, results, strict=True):
            r[...] = plsc.bitcast(result, jnp.int32)
            plsc.sync_copy(r, out)

    bits = tuple(w.view(np.int32) for w in wanted)
    ints = plsc.VMEM((16,), jnp.int32)
    scratch = plsc.VMEM((16,), x.dtype), ints, ints
    mask = MASK.astype(np.int32)
    check(body, [x, mask], bits, *scratch, subcores=1, schedules=1, chips=["tpu7x"])


# What loads or stores lanes of VMEM: `compute(v, x, m)` with v of 16 elements.
MEMORY: dict[str, tuple[Callable[..., Any], Any]] = {
    "load_gather": (lambda v, x, m: plsc.load_gather(v, [x & 15]), X[X & 15]),
    "load_gather under a mask": (
        lambda v, x, m: jnp.where(
            m, plsc.load_gather(v, [jnp.where(m, x & 15, 99)], mask=m), 0
        ),
        np.where(MASK, X[X & 15], 0),
    ),
    "load_expanded": (
        lambda v, x, m: jnp.where(m, plsc.load_expanded(v, mask=m), 0),
        np.where(MASK, X[np.cumsum(MASK) - 1], 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MEMORY)
def test_lanes_are_loaded_from_positions_of_their_own(case):
    compute, expected = MEMORY[case]

    def body(x_ref, m_ref, o, v, m):
        plsc.sync_copy(x_ref, v)
        plsc.sync_copy(m_ref, m)
        m_value = m[...] != 0
        v[...] = compute(v, v[...], m_value)
        plsc.sync_copy(v, o)

    ints = plsc.VMEM((16,), jnp.int32)
    check(
        body,
        [X, MASK.astype(np.int32)],
        expected,
        ints,
        ints,
        subcores=1,
        chips=["tpu7x"],
    )


def _scattered() -> np.ndarray:
    result = np.zeros(16, np.int32)
    for i in range(16):
        result[FEW[i]] = X[i]
    return result


def _compressed(add: bool) -> np.ndarray:
    result = np.full(16, 100, np.int32)
    chosen = X[MASK]
    result[: len(chosen)] = chosen + (100 if add else 0)
    return result


STORES: dict[str, tuple[int, Callable[..., None], np.ndarray]] = {
    "store_scatter: the highest lane remains": (
        0, lambda v, x, i, m: plsc.store_scatter(v, [i], x), _scattered()),
    "addupdate_scatter: all lanes are added": (
        0, lambda v, x, i, m: plsc.addupdate_scatter(v, [i], x),
        np.bincount(FEW, X, 16).astype(np.int32)),
    "store_compressed": (
        100, lambda v, x, i, m: plsc.store_compressed(v, x, mask=m),
        _compressed(False)),
    "addupdate_compressed": (
        100, lambda v, x, i, m: plsc.addupdate_compressed(v, x, mask=m),
        _compressed(True)),
    "addupdate": (100, lambda v, x, i, m: plsc.addupdate(v, x), X + 100),
}  # fmt: skip


@pytest.mark.parametrize("case", STORES)
def test_lanes_are_stored_at_positions_of_their_own(case):
    before, store, expected = STORES[case]

    def body(x_ref, i_ref, m_ref, o, x, i, m, v):
        plsc.sync_copy(x_ref, x)
        plsc.sync_copy(i_ref, i)
        plsc.sync_copy(m_ref, m)
        v[...] = jnp.full(16, before, jnp.int32)
        store(v, x[...], i[...], m[...] != 0)
        plsc.sync_copy(v, o)

    ints = [plsc.VMEM((16,), jnp.int32)] * 4
    args = [X, FEW, MASK.astype(np.int32)]
    check(body, args, expected, *ints, subcores=1, chips=["tpu7x"])


# --- lanes without a value ------------------------------------------------------------

one = functools.partial(emulate, subcores=1)
INTS = plsc.VMEM((16,), jnp.int32)


@refused_by(one, [X], X, INTS)
def test_a_scan_has_no_value_before_the_first_true_lane(x, o, v):
    plsc.sync_copy(x, v)
    v[...] = plsc.cumsum(v[...], mask=jnp.arange(16) > 2)  # HERE
    plsc.sync_copy(v, o)


@refused_by(one, [X], X, INTS)
def test_lanes_that_are_not_loaded_have_no_value(x, o, v):
    plsc.sync_copy(x, v)
    v[...] = plsc.load_expanded(v, mask=jnp.arange(16) < 8)  # HERE
    plsc.sync_copy(v, o)


@refused_by(one, [X], X, INTS, INTS)
def test_a_store_adds_to_elements_without_a_value(x, o, v, w):
    plsc.sync_copy(x, v)
    plsc.addupdate_scatter(w, [jnp.arange(16)], v[...])  # HERE
    plsc.sync_copy(w, o)


@refused_by(one, [X], X, INTS)
def test_lanes_behind_those_that_are_sorted_have_no_value(x, o, v):
    plsc.sync_copy(x, v)
    v[...] = plsc.sort_key_val(v[...], v[...], mask=v[...] > 0)[0]  # HERE
    plsc.sync_copy(v, o)
