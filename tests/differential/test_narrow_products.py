# SPDX-License-Identifier: Apache-2.0
"""Products with scales, and sparse ones: copies, words and columns are upstream's.

See test_tensor_core.py; the file of what both agree in is `narrow_products.txt`.
"""

from __future__ import annotations

import pathlib

import jax.numpy as jnp
import pytest

from tests.support.differential import golden
from tests.support.differential import tensor_kernels as kernels
from tests.support.differential.narrow_kernels import E2M1, E4M3, Narrow, describe

E5M2, F16, BF16 = jnp.float8_e5m2, jnp.float16, jnp.bfloat16

PRODUCTS = {
    "mxf8": Narrow(128, 256),
    "mxf8, two types, N of 256": Narrow(256, 256, a=E5M2),
    "mxf4": Narrow(128, 256, E2M1, E2M1),
    "nvf4": Narrow(256, 256, E2M1, E2M1, E4M3, 16),
    "mxf4, a in TMEM": Narrow(128, 256, E2M1, E2M1, a_in_tmem=True),
    "a pair, mxf8": Narrow(256, 256, ctas=2),
    "a pair, nvf4": Narrow(128, 256, E2M1, E2M1, E4M3, 16, ctas=2),
    "a pair, mxf8, 64 rows": Narrow(64, 256, ctas=2, m=64),
    "a pair, nvf4, 64 rows": Narrow(128, 256, E2M1, E2M1, E4M3, 16, ctas=2, m=64),
    "sparse": Narrow(128, 128, F16, F16, None, sparse=True),
    "sparse, float8": Narrow(64, 256, E4M3, E5M2, None, sparse=True),
    "a pair, sparse": Narrow(128, 256, BF16, BF16, None, ctas=2, sparse=True),
    "a pair, sparse, float8": Narrow(128, 256, scale=None, ctas=2, sparse=True),
    "sparse, scales": Narrow(128, 256, block=64, sparse=True),
    "a pair, sparse, scales": Narrow(128, 256, block=64, ctas=2, sparse=True),
    "sparse, mxf4": Narrow(128, 512, E2M1, E2M1, block=64, sparse=True),
    "sparse, nvf4": Narrow(128, 512, E2M1, E2M1, E4M3, 32, sparse=True),
    "a pair, sparse, nvf4": Narrow(128, 512, E2M1, E2M1, E4M3, 32, 2, True),
}
GOLDEN = pathlib.Path(__file__).with_name("narrow_products.txt")


@pytest.mark.offline
@kernels.by_each
@pytest.mark.parametrize("name", PRODUCTS)
def test_narrow_products_are_those_of_the_file(name, compiled):
    case = PRODUCTS[name]
    assert describe(case, compiled(*case.kernel())) == golden.lines(GOLDEN)[name]


def test_each_line_of_the_file_is_of_a_product():
    assert list(golden.lines(GOLDEN)) == list(PRODUCTS)
