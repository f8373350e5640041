# SPDX-License-Identifier: Apache-2.0
"""load, layout_cast and broadcasted_iota: results and refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import effects as see
from tests.support import everywhere
from tests.support.entry_kernels import f32, numbers, run
from tests.support.refusal import refused_by


def test_load_takes_an_index():
    def body(x, o):
        o[...] = plgpu.load(x, plgpu.ds(8, 8))

    np.testing.assert_array_equal(run(body, out=f32(8, 128)), numbers()[8:16])


# The spellings of this package and of jax 0.12.
STORES = {
    "index and value": lambda o, x: plgpu.store(o, plgpu.ds(8, 8), x),
    "value": lambda o, x: plgpu.store(o.at[8:16], x),
    "value by name": lambda o, x: plgpu.store(o.at[8:16], value=x),
    "value, with conflicts": lambda o, x: plgpu.store(o.at[8:16], x, optimized=False),
    "value under a mask": lambda o, x: plgpu.store(o.at[8:16], x, mask=x > -1e9),
}


@pytest.mark.parametrize("store", STORES)
def test_store_takes_a_value_with_or_without_an_index(store):
    def body(x, o):
        o[...] = x[...]
        STORES[store](o, x[16:24])

    expected = numbers()
    expected[8:16] = expected[16:24]
    np.testing.assert_array_equal(run(body), expected)


@pytest.mark.parametrize(
    ("mask", "is_needed"),
    [
        (lambda i: jnp.arange(128) < 128, False),
        (lambda i: (jnp.arange(64) * 2 + 1 <= 127)[:, None], False),
        (lambda i: True, False),
        (lambda i: jnp.arange(128) < 127, True),
        (lambda i: jnp.arange(128) < i + 128, True),
    ],
)
def test_a_mask_of_constants_that_leaves_out_nothing_is_none(mask, is_needed):
    def body(x, o):
        found = mask(lax.axis_index("i"))
        plgpu.store(o, (), plgpu.load(x, mask=found, other=7.0), mask=found)

    kernel = plgpu.kernel(body, out_type=f32(64, 128), grid=(1,), grid_names=("i",))
    text = str(jax.make_jaxpr(kernel)(f32(64, 128)))
    assert ("load_indexed" in text, "store_indexed" in text) == (is_needed,) * 2


CALLS = {
    "a store without a value": lambda x: plgpu.store(x),
    "an axis that does not exist": lambda x: plgpu.sum(x[...], axis=(0, 2)),
    "an axis twice": lambda x: plgpu.max(x[...], axis=(1, -1)),
    "a sum of bools": lambda x: plgpu.sum(x[...] > 0),
    "a reference that is reduced": lambda x: plgpu.min(x),
    "a load outside": lambda x: plgpu.load(x.at[plgpu.ds(60, 8)]),
    "a layout by its name": lambda x: plgpu.load(x, layout="wgmma"),
    "a cast to no layout": lambda x: plgpu.layout_cast(x[...], None),
    "an iota of dimension 2": lambda x: plgpu.broadcasted_iota("f4", (64, 128), 2),
    "a load under vmap": lambda x: jax.vmap(lambda i: plgpu.load(x.at[i]))(
        lax.iota(jnp.int32, 4)
    ),
}


@pytest.mark.parametrize("call", CALLS)
@refused_by(run)
def test_the_call_is_refused(x, o, *, call):
    CALLS[call](x)


@pytest.mark.parametrize("dimension", [0, 1, -1])
def test_an_iota_counts_along_its_dimension(dimension):
    def body(x, o):
        o[...] = plgpu.broadcasted_iota(jnp.float32, (64, 128), dimension)

    expected = lax.broadcasted_iota(jnp.float32, (64, 128), dimension % 2)
    np.testing.assert_array_equal(run(body), expected)


def test_vmap_of_pure_operations_works_inside_a_body():
    def body(x, o):
        o[...] = jax.vmap(lambda row: row - row.max())(x[...])

    x = numbers()
    np.testing.assert_array_equal(run(body), x - x.max(1, keepdims=True))


BYTES = np.random.default_rng(0).integers(-4, 5, (64, 128)).astype(np.int8)


@pytest.mark.parametrize("name", ["max", "min", "sum", "prod"])
def test_a_reduction_keeps_the_element_type(name):
    reduce = getattr(plgpu, name)

    def body(x, o, o_all):
        o[...] = reduce(x[...], axis=-1, keepdims=True, accumulator_ilp=2)
        o_all[...] = reduce(reduce(x[...], 1))

    rows = getattr(np, name)(BYTES, axis=1, keepdims=True, **dtype_of(name))
    total = getattr(np, name)(BYTES, **dtype_of(name))
    everywhere.check(everywhere.kernel(body, (rows, total)), [BYTES], (rows, total))


def dtype_of(name):
    return {"dtype": np.int8} if name in ("sum", "prod") else {}


STRIDED = [plgpu.Layout.WG_STRIDED((64, 128), vec_size=n) for n in (1, 4)]
REDUCTIONS = ("max", "min", "prod", "sum")
GOOD = {
    "load": lambda e: {"src": e.x},
    "store": lambda e: {"dst": e.o, "idx": (), "value": 0.0},
    "layout_cast": lambda e: {"x": e.array, "new_layout": plgpu.Layout.WGMMA},
    "broadcasted_iota": lambda e: {
        "dtype": jnp.int32,
        "shape": (64, 128),
        "dimension": 0,
    },
    **dict.fromkeys(REDUCTIONS, lambda e: {"x": e.array}),
}
EFFECTS = {
    "load.idx": [0, 1],
    "load.optimized": "tests/lowering/test_warpgroup.py",
    "load.layout": STRIDED,
    "load.mask": [lambda e: e.x[...] > 0, lambda e: e.x[...] > 1],
    "load.other": lambda: see.bodies(
        *(
            lambda e, n=n: e.o.set(plgpu.load(e.x, mask=e.x[...] > 0, other=n))
            for n in (0.0, 1.0)
        )
    ),
    "store.idx": [plgpu.ds(0, 8), plgpu.ds(8, 8)],
    "store.value": [0.0, 1.0],
    "store.optimized": "tests/lowering/test_parts_of_tiles.py",
    "store.mask": [lambda e: e.x[...] > 0],
    "broadcasted_iota.layout": STRIDED,
    **{f"{name}.axis": [0, 1] for name in REDUCTIONS},
    **{f"{name}.keepdims": "" for name in REDUCTIONS},
    **{f"{name}.accumulator_ilp": see.HINT for name in REDUCTIONS},
}
