# SPDX-License-Identifier: Apache-2.0
"""Copies from SMEM to TMEM: instructions, addresses and descriptors are upstream's."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from tests.support.differential import tensor_facts as facts
from tests.support.differential import tensor_kernels as kernels
from tests.support.tensor_products import E4M3, F16, F32

WIDE = "cta_group::1.128x256b"
# Columns, dtype and swizzle; what both packages emit: of each instruction the column of
# the target and the start of the source, in units of 16 bytes and hexadecimal.
COPIES = {
    "f16": (64, F16, 128, f"{WIDE}; sw128 sbo64 lbo-; 0:0 8:2 10:4 18:6"),
    "two swizzles": (
        128,
        F16,
        128,
        f"{WIDE}; sw128 sbo128 lbo-; 0:0 8:2 10:4 18:6 20:40 28:42 30:44 38:46",
    ),
    "64-byte swizzle": (64, F16, 64, f"{WIDE}; sw64 sbo64 lbo-; 0:0 8:2 10:20 18:22"),
    "32-byte swizzle": (64, F16, 32, f"{WIDE}; sw32 sbo64 lbo-; 0:0 8:10 10:20 18:30"),
    "no swizzle": (16, F16, None, "cta_group::1.128x128b; sw16 sbo16 lbo-; 0:0 4:8"),
    "float8": (128, E4M3, 128, f"{WIDE}; sw128 sbo64 lbo-; 0:0 8:2 10:4 18:6"),
    "a pair": (
        64,
        F16,
        128,
        2,
        "cta_group::2.128x256b; sw128 sbo64 lbo-; 0:0 8:2 10:4 18:6",
    ),
    "f32": (32, F32, 128, f"{WIDE}; sw128 sbo64 lbo-; 0:0 8:2 10:4 18:6"),
}
ORDER = "alloc, relinquish, expect, tma, wait, cp, commit, wait, after"


@pytest.mark.offline
@kernels.by_each
@pytest.mark.parametrize("case", COPIES.values(), ids=COPIES)
def test_instructions_of_a_copy(case, compiled):
    assert facts.copies(compiled(*kernels.copy(*case[:-1]))) == case[-1]


@pytest.mark.offline
@kernels.beside_upstream
def test_a_copy_stands_between_the_same_instructions():
    kernel = kernels.copy(64, jnp.float16, 128)
    ours, theirs = (
        ", ".join(facts.order(compile_(*kernel, semantics="Lane")))
        for compile_ in (kernels.ours, kernels.upstreams)
    )
    assert theirs == f"{ORDER}, free"
    assert ours == f"{ORDER}, wait ld, before, after, free"
