# SPDX-License-Identifier: Apache-2.0
"""tcgen05 and TMEM: the instructions, addresses and descriptors are upstream's.

Both packages compile the same kernels for sm_100a. What they agree in is kept in
`tensor_core.txt`, with which ours is compared alone where upstream is another version.
The differences that are meant are stated below, each in a test of its own.
"""

from __future__ import annotations

import pathlib

import jax.numpy as jnp
import pytest

from tests.support.differential import golden
from tests.support.differential import tensor_facts as facts
from tests.support.differential import tensor_kernels as kernels
from tests.support.differential.tensor_kernels import Transfer
from tests.support.differential.tensor_stream import products
from tests.support.tensor_products import BF16, E4M3, E5M2, F16, F32, Product

I8, U8, I32 = jnp.int8, jnp.uint8, jnp.int32
offline = pytest.mark.offline

PRODUCTS = {
    "f16": Product(),
    "b along K": Product(b_stored=True),
    "a along M": Product(a_stored=True),
    "both turned": Product(a_stored=True, b_stored=True),
    "bf16": Product(a=BF16, b=BF16, n=8, b_stored=True),
    "64-byte swizzle": Product(swizzle=64),
    "64-byte swizzle turned": Product(swizzle=64, a_stored=True, b_stored=True),
    "32-byte swizzle": Product(swizzle=32, k=32),
    "32-byte swizzle turned": Product(swizzle=32, k=32, a_stored=True, b_stored=True),
    "K of three swizzles": Product(k=192),
    "f16 accumulator": Product(acc=F16),
    "e4m3 and e5m2": Product(a=E4M3, b=E5M2, b_stored=True, k=128),
    "e5m2 along N": Product(a=E5M2, b=E5M2, k=128, n=128),
    "e4m3 along M": Product(a=E4M3, b=E4M3, k=128, n=128, a_stored=True),
    "s8": Product(a=I8, b=I8, acc=I32, b_stored=True, k=128, n=96),
    "s8 along N": Product(a=I8, b=I8, acc=I32, k=128, n=128),
    "N of 24": Product(n=24, b_stored=True),
    "N of 256": Product(n=256),
    "N of 512": Product(n=512),
    "N of 512, b along K": Product(n=512, b_stored=True),
    "64 rows": Product(m=64, n=128),
    "64 rows, N of 256, turned": Product(m=64, n=256, a_stored=True, b_stored=True),
    "64 rows, 64-byte swizzle": Product(m=64, n=64, swizzle=64),
    "accumulated": Product(k=32, swizzle=64, rounds=3),
    "a in TMEM": Product(a_in_tmem=True),
    "bf16 in TMEM, N of 256": Product(a=BF16, b=BF16, n=256, a_in_tmem=True),
    "e4m3 in TMEM": Product(a=E4M3, b=E4M3, k=128, n=128, a_in_tmem=True),
}
# Upstream has no tf32 and no u8.
OURS_ALONE = {
    "tf32": Product(a=F32, b=F32, b_stored=True, k=32),
    "tf32 in TMEM": Product(a=F32, b=F32, b_stored=True, k=32, a_in_tmem=True),
    "s8 and u8": Product(a=I8, b=U8, acc=I32, b_stored=True, k=128, n=32),
}
GOLDEN = pathlib.Path(__file__).with_name("tensor_core.txt")


def check(name, compiled):
    case = {**PRODUCTS, **OURS_ALONE}[name]
    stream = compiled(*kernels.product(case))
    text = facts.describe(stream, jnp.dtype(case.a).itemsize)
    assert text == golden.lines(GOLDEN)[name]


@offline
@kernels.by_each
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_those_of_the_file(name, compiled):
    check(name, compiled)


@offline
@kernels.by_ours
@pytest.mark.parametrize("name", OURS_ALONE)
def test_products_of_ours_alone_are_those_of_the_file(name, compiled):
    check(name, compiled)


def test_each_line_of_the_file_is_of_a_product():
    assert list(golden.lines(GOLDEN)) == [*PRODUCTS, *OURS_ALONE]


@offline
@kernels.by_upstream
def test_both_semantics_of_upstream_agree(compiled):
    check("a along M", compiled)


@offline
@kernels.beside_upstream
def test_upstream_omits_the_constant_of_shared_memory_descriptors():
    """Bits 46-48 are 0b001 in the PTX ISA, "Shared memory descriptor"."""
    versions = [
        {
            facts.version(descriptor)
            for product in products(compile_(*kernels.product(Product()), semantics=s))
            for descriptor in (product.a, product.b)
        }
        for compile_ in (kernels.ours, kernels.upstreams)
        for s in kernels.SEMANTICS
    ]
    assert versions == [{1}, {1}, {0}, {0}]


# --- order ----------------------------------------------------------------------------

# Before TMEM is freed ours waits for loads whose values nobody used, and fences.
FREED = "wait ld, before, after, free"
PRODUCT = (
    "alloc, relinquish, expect, tma, expect, tma, wait, mma, commit, wait, after, ld"
)
HANDOVER = "alloc, relinquish, st, wait st, before, arrive, wait, after, ld, wait ld"


def order(stream):
    return ", ".join(facts.order(stream))


@offline
@kernels.by_ours
def test_order_of_a_product(compiled):
    assert order(compiled(*kernels.product(Product()))) == f"{PRODUCT}, {FREED}"


@offline
@kernels.by_upstream
def test_upstreams_order_of_a_product_is_the_same_but_for_the_end(compiled):
    assert order(compiled(*kernels.product(Product()))) == f"{PRODUCT}, free"


# --- loads and stores -----------------------------------------------------------------

TRANSFERS = {
    "f32": (Transfer(("TCGEN05",)), "16x256b.x8 0+0, 16x256b.x8 16+0"),
    "f32, several": (
        Transfer(("TCGEN05",), columns=104),
        "16x256b.x8 0+0, 16x256b.x4 0+64, 16x256b.x1 0+96, "
        "16x256b.x8 16+0, 16x256b.x4 16+64, 16x256b.x1 16+96",
    ),
    "f32, native": (
        Transfer(("TCGEN05_TMEM_NATIVE",)),
        "32x32b.x32 0+0, 32x32b.x32 0+32",
    ),
    "f16 packed": (
        Transfer(("TCGEN05",), dtype=F16, packed=True),
        "16x128b.x8 0+0, 16x128b.x8 16+0",
    ),
    "f16 unpacked": (
        Transfer(("TCGEN05",), dtype=F16),
        "16x128b.x8.pack 0+0, 16x128b.x8.pack 16+0",
    ),
    "f16 packed, native": (
        Transfer(("TCGEN05_TMEM_NATIVE", 2), dtype=F16, packed=True),
        "32x32b.x32 0+0",
    ),
    "f16 unpacked, native": (
        Transfer(("TCGEN05_TMEM_NATIVE", 2), dtype=F16),
        "32x32b.x32.pack 0+0",
    ),
    "s8 packed, native": (
        Transfer(("TCGEN05_TMEM_NATIVE", 4), dtype=I8, packed=True),
        "32x32b.x16 0+0",
    ),
    "64 rows": (Transfer(("WGMMA",), rows=64), "16x256b.x4 0+0, 16x256b.x4 16+0"),
    "64 rows of f16": (
        Transfer(("WGMMA",), rows=64, dtype=F16),
        "16x128b.x4.pack 0+0, 16x128b.x4.pack 16+0",
    ),
    "64 rows of f16, packed": (
        Transfer(("WGMMA",), rows=64, dtype=F16, packed=True),
        "16x128b.x4 0+0, 16x128b.x4 16+0",
    ),
    "two matrices": (
        Transfer(("TCGEN05",), columns=16, matrices=2),
        "16x256b.x2 0+0, 16x256b.x2 16+0, 16x256b.x2 0+16, 16x256b.x2 16+16",
    ),
    "64 rows of a pair": (
        Transfer(("TCGEN05_M64_COLLECTIVE", 64), rows=64, pair=True),
        "16x256b.x4 0+0, 16x256b.x4 16+0",
    ),
}


def expected(text):
    """A store of each, then a load; the qualifier is `unpack` in stores."""
    loads = [part.replace("pack", "pack::16b") for part in text.split(", ")]
    stores = [part.replace("pack", "unpack") for part in loads]
    return [*(f"st {part}" for part in stores), *(f"ld {part}" for part in loads)]


@offline
@kernels.by_each
@pytest.mark.parametrize("case, text", TRANSFERS.values(), ids=TRANSFERS)
def test_loads_and_stores_of_a_pair_of_layouts(case, text, compiled):
    assert facts.transfers(compiled(*case.kernel())) == expected(text)


@offline
@kernels.by_ours
def test_order_of_a_handover(compiled):
    """Each wait ends with a barrier of the warpgroup between two fences."""
    text = order(compiled(*kernels.handover()))
    waited = HANDOVER.replace("wait st, before", "wait st, before, after, before")
    assert text == f"{waited}, before, after, {FREED}"


@offline
@kernels.by_upstream
def test_upstreams_order_of_a_handover_lacks_the_fences_of_waits(compiled):
    assert order(compiled(*kernels.handover())) == f"{HANDOVER}, free"
