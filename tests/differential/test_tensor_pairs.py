# SPDX-License-Identifier: Apache-2.0
"""tcgen05 of pairs of CTAs: the instructions and descriptors are upstream's.

See test_tensor_core.py; the file of what both agree in is `tensor_pairs.txt`.
"""

from __future__ import annotations

import pathlib

import jax.numpy as jnp
import pytest

from tests.support.differential import golden
from tests.support.differential import tensor_facts as facts
from tests.support.differential import tensor_kernels as kernels
from tests.support.tensor_pairs import PairProduct
from tests.support.tensor_products import BF16, E4M3, E5M2

I8, I32 = jnp.int8, jnp.int32

PRODUCTS = {
    "f16": PairProduct(),
    "128 rows": PairProduct(m=64),
    "b along N": PairProduct(n=128, b_stored=False),
    "a along M": PairProduct(a_stored=True),
    "bf16, N of 256": PairProduct(a=BF16, b=BF16, n=256),
    "128 rows, N of 256": PairProduct(m=64, n=256, b_stored=False),
    "64-byte swizzle": PairProduct(swizzle=64, b_stored=False),
    "e4m3 and e5m2": PairProduct(a=E4M3, b=E5M2, k=128),
    "s8": PairProduct(a=I8, b=I8, acc=I32, k=128),
    "a in TMEM": PairProduct(a_in_tmem=True),
}
GOLDEN = pathlib.Path(__file__).with_name("tensor_pairs.txt")


@pytest.mark.offline
@kernels.by_each
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_pairs_are_those_of_the_file(name, compiled):
    case = PRODUCTS[name]
    stream = compiled(*kernels.product(case))
    text = facts.describe(stream, jnp.dtype(case.a).itemsize)
    assert text == golden.lines(GOLDEN)[name]


def test_each_line_of_the_file_is_of_a_product():
    assert list(golden.lines(GOLDEN)) == list(PRODUCTS)
