# SPDX-License-Identifier: Apache-2.0
"""The kernels of benchmarks/author_kernels: right when small, compiled at full size."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from benchmarks import authors

CONFIGS = [(n, c) for n in authors.NAMES for c in authors.module(n).CONFIGS]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", authors.NAMES)
def test_a_kernel_computes_its_reference(name, last):
    config = authors.module(name).CONFIGS[-last]
    own = authors.module(name)
    args = tuple(map(jnp.asarray, own.arrays(*own.SMALL)))
    pair = own.function(*args, config=config), own.reference(*args)
    found = (authors.comparable(name, args, x) for x in pair)
    assert authors.error(*found) <= authors.TOLERANCES.get(name, 5e-3)


@pytest.mark.offline
@pytest.mark.parametrize(("name", "config"), CONFIGS)
def test_a_kernel_of_full_size_compiles_without_spills(name, config):
    own = authors.module(name)
    args = jax.eval_shape(lambda: tuple(map(jnp.asarray, own.arrays(*own.FULL))))
    call = functools.partial(own.function, config=config)
    for report in plgpu.offline.compile(call, *args):
        assert report.resources.spill_store_bytes == 0
