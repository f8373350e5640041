# SPDX-License-Identifier: Apache-2.0
"""Parts of tiled SMEM arrays that cut through tiles, and single elements of them."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import ds, errors
from tests.support import acceptance, everywhere
from tests.support.lockstep import kernels as in_lockstep
from tests.support.semantics import BOTH, Warpgroup, under

TRANSFORMS = {
    "swizzled": (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),
    "narrow": (plgpu.TilingTransform((8, 8)), plgpu.SwizzleTransform(32)),
    "tiled": (plgpu.TilingTransform((4, 16)),),
}
X = np.arange(24 * 96, dtype=np.float32).reshape(24, 96)


def run(make_body, transforms, expected, *args):
    """Runs a body with the array in SMEM everywhere."""
    array = plgpu.SMEM(X.shape, X.dtype, transforms=transforms)

    def body(x, *refs):
        *inputs, out, held = refs
        held[...] = x[...]
        make_body(held, out, *inputs)

    with pytest.warns(errors.PerformanceWarning, match="an address for each element"):
        everywhere.run(body, [X, *args], expected, array)


@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("index", [np.s_[3:10, 5:90], np.s_[1:2, 7:40], np.s_[5:6, :]])
def test_a_part_inside_of_tiles_is_loaded(kind, index):
    def body(held, out):
        out[...] = held[index]

    run(body, TRANSFORMS[kind], X[index])


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_a_part_inside_of_tiles_is_stored(kind):
    def body(held, out):
        held[3:10, 5:90] = held[3:10, 5:90] * 2
        out[...] = held[...]

    expected = X.copy()
    expected[3:10, 5:90] *= 2
    run(body, TRANSFORMS[kind], expected)


@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("start", [8, 3])
def test_a_dynamic_start_of_which_nothing_is_known(kind, start):
    def body(held, out, at):
        out[...] = held[ds(at[0], 8)]

    at = np.array([start], np.int32)
    run(body, TRANSFORMS[kind], X[start : start + 8], at)


def test_a_start_that_is_a_multiple_of_the_tile_is_not_slow(recwarn):
    def body(x, at, out, held):
        held[...] = x[...]
        out[...] = held[ds(at[0] * 8, 8)]

    array = plgpu.SMEM(X.shape, X.dtype, transforms=TRANSFORMS["swizzled"])
    at = np.array([2], np.int32)
    # Under Lane the store of the whole array has the layout of its load from GMEM.
    options = {"semantics": [Warpgroup], "executed": [Warpgroup]}
    everywhere.run(body, [X, at], X[16:], array, **options)
    assert not [w for w in recwarn if "for each element" in str(w.message)]


@everywhere.tests(run, TRANSFORMS["swizzled"], X[3:10, 5:90].T)
def test_a_transposed_part(held, out):
    out[...] = held.at[3:10, 5:90].T[...]


def test_single_elements_of_a_tiled_array():
    x = X[:, :64]

    def body(x, out, held):
        held[...] = x[...]
        held[5, 40] = held[17, 3] + held[2, 63]
        out[...] = held[...]

    array = plgpu.SMEM(x.shape, x.dtype, transforms=TRANSFORMS["swizzled"])
    expected = x.copy()
    expected[5, 40] = x[17, 3] + x[2, 63]
    everywhere.run(body, [x], expected, array)


def test_one_array_is_an_operand_of_wgmma_and_read_by_element():
    x = (np.arange(64 * 64).reshape(64, 64) % 7 - 3).astype(np.float16)

    def body(x, out, held, acc):
        held[...] = x[...]
        plgpu.commit_smem()
        plgpu.wgmma(acc, held, held)
        out[...] = acc[...] + held[3, 3].astype(jnp.float32)

    scratch = [plgpu.SMEM(x.shape, x.dtype), plgpu.ACC((64, 64))]
    wide = x.astype(np.float32)
    expected = wide @ wide + wide[3, 3]
    everywhere.run(body, [x], expected, *scratch, semantics=[Warpgroup])


# --- warnings -------------------------------------------------------------------------


SQUARE = plgpu.SMEM((64, 64), jnp.float32)


def warnings_of(body, semantics, *scratch, shape=(64, 64)) -> list[str]:
    """The texts of the warnings when a body is lowered."""
    x = np.zeros(shape, np.float32)
    kernel = everywhere.kernel(body, x, *scratch)()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        in_lockstep.lower(under(semantics, kernel), [x])
    return [str(w.message) for w in seen if w.category is errors.PerformanceWarning]


@pytest.mark.parametrize("semantics", BOTH)
def test_a_store_with_bank_conflicts_is_accepted_by_what_the_hint_says(semantics):
    def found(optimized):
        def body(x, o, held):
            plgpu.store(held, np.s_[:, 0], x[0], optimized=optimized)
            o[...] = x[...]

        return warnings_of(body, semantics, SQUARE)

    (text,) = found(None)
    assert text.startswith("a store of SMEM has 32-way bank conflicts (")
    assert "accept it with plgpu.store(..., optimized=False)" in text
    assert found(False) == []
    with pytest.raises(errors.LayoutError, match="this store of shared memory has"):
        found(True)


@pytest.mark.parametrize("semantics", BOTH)
def test_bank_conflicts_are_a_warning_with_the_line(semantics):
    def body(x, o, held):
        held[...] = x[...]
        o[0] = held[:, 0]  # HERE

    (text,) = warnings_of(body, semantics, SQUARE)
    assert text.startswith("a load of SMEM has 32-way bank conflicts (")
    lines = Path(__file__).read_text().splitlines()
    line = lines.index("        o[0] = held[:, 0]  # HERE")
    assert re.search(rf"test_parts_of_tiles.py:{line + 1}\b", text)


def test_nothing_is_said_of_what_is_emitted_on_trial():
    """The layout of the carry is that of what the loop adds, not the default one."""

    def body(x, o, held):
        def step(_, total):
            held.T[...] = total
            return total + plgpu.load(x, layout=plgpu.Layout.WGMMA, optimized=False)

        o[...] = lax.fori_loop(0, 3, step, jnp.zeros(x.shape, x.dtype))

    (text,) = warnings_of(body, plgpu.LoweringSemantics.Lane, SQUARE)
    assert text.startswith("a store of SMEM has 4-way bank conflicts (")


@pytest.mark.parametrize("semantics", BOTH)
def test_a_start_without_alignment_is_a_warning(semantics):
    def body(x, o):
        o[...] = x[...]
        o[0:8] = x.at[3:11, :][...] + 1  # rows are aligned

    assert warnings_of(body, semantics) == []

    def shifted(x, o):
        o[...] = x[...]
        o[0:1024] = x[3:1027]

    (text,) = warnings_of(shifted, semantics, shape=(4096,))
    assert "a load of GMEM takes 4 bytes of each thread at a time, and 16 where" in text


@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("optimized", [False, True])
def test_the_author_accepts_conflicts_or_excludes_them(semantics, optimized):
    def body(x, o, held):
        held[...] = x[...]
        o[0] = plgpu.load(held, np.s_[:, 0], optimized=optimized)

    if not optimized:
        assert warnings_of(body, semantics, SQUARE) == []
        return
    with pytest.raises(errors.LayoutError, match="bank conflicts"):
        warnings_of(body, semantics, SQUARE)


@pytest.mark.parametrize("rows, warned", [(512, True), (64, False)])
def test_an_array_of_more_registers_than_a_thread_has_is_named(rows, warned):
    def body(x, o):
        o[...] = x[...] + 1

    found = warnings_of(body, Warpgroup, shape=(rows, 128))
    said = [text for text in found if "larger than the registers" in text]
    assert bool(said) is warned
    assert not warned or "512 registers of each thread, which has 255" in said[0]


def test_a_bitcast_that_contradicts_the_tiles_of_wgmma_is_refused_everywhere():
    x = (np.arange(64 * 64).reshape(64, 64) % 7 - 3).astype(np.float16)

    def body(x, out, held, acc):
        held.bitcast(jnp.uint16)[...] = lax.bitcast_convert_type(x[...], jnp.uint16)
        plgpu.commit_smem()
        plgpu.wgmma(acc, held, held)
        out[...] = acc[...]

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.ACC((64, 64))],
    )
    verdict = acceptance.judge(kernel, [x])
    assert isinstance(verdict.emulated, errors.LayoutError)
    assert str(verdict.emulated) == str(verdict.lowered[Warpgroup])
