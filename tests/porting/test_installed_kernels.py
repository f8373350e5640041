# SPDX-License-Identifier: Apache-2.0
"""The kernels that JAX installs for Mosaic GPU, with their import lines changed."""

from __future__ import annotations

import collections
import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import arch, errors
from tests.support import host
from tests.support import installed_kernels as installed
from tests.support.differential import sides
from tests.support.installed_kernels import ported
from tests.support.semantics import BOTH, under

pytestmark = pytest.mark.skipif(
    not jax.__version__.startswith("0.11."), reason="kernels of upstream 0.11"
)


def normal(shape, dtype=jnp.bfloat16, seed=0, scale=1.0):
    x = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(x * scale, dtype)


def wide(x):
    return np.asarray(x, np.float32)


def close(got, expected, error):
    np.testing.assert_allclose(wide(got), wide(expected), rtol=error, atol=error)


@pytest.mark.parametrize("clusters", [False, True])
def test_matmul(clusters):
    module = ported("hopper_matmul_mgpu")
    dims = module.MatmulDimension
    options = {"wg_dimension": dims.M, "cluster_dimension": dims.N} if clusters else {}
    a, b = normal((256, 128)), normal((128, 256), seed=1, scale=1 / 16)
    config = module.TuningConfig(64, 64, 64, 3, **options)
    close(module.matmul(a, b, None, config), wide(a) @ wide(b), 0.02)


def test_mixed_type_matmul():
    module = ported("hopper_mixed_type_matmul_mgpu")
    a = host.array(np.random.default_rng(0).integers(-8, 8, (128, 128)), jnp.int8)
    b = normal((128, 128), scale=1 / 16)
    config = module.TuningConfig(64, 64, 64, 3)
    got = module.mixed_matmul_kernel(a, b, out_dtype=jnp.bfloat16, config=config)
    close(got, wide(a) @ wide(b), 0.05)


def test_ragged_dot():
    module = ported("ragged_dot_mgpu")
    lhs, rhs = normal((192, 64)), normal((3, 64, 128), seed=1, scale=1 / 8)
    sizes = jnp.asarray([100, 0, 92], jnp.int32)
    got = module.ragged_dot(
        lhs,
        rhs,
        group_sizes=sizes,
        block_m=64,
        block_n=64,
        block_k=64,
        max_concurrent_steps=2,
        grid_block_n=2,
    )
    ends = [wide(lhs[:100]) @ wide(rhs[0]), wide(lhs[100:]) @ wide(rhs[2])]
    close(got, np.concatenate(ends), 0.02)


def transposed(steps):
    module = ported("transposed_ragged_dot_mgpu")
    lhs, rhs = normal((320, 64)), normal((320, 64), seed=1, scale=1 / 16)
    got = module.transposed_ragged_dot(
        lhs,
        rhs,
        group_sizes=jnp.asarray([100, 220], jnp.int32),
        block_m=64,
        block_n=64,
        block_k=64,
        max_concurrent_steps=steps,
        grid_block_n=1,
    )
    parts = slice(0, 100), slice(100, 320)
    return got, np.stack([wide(lhs[p]).T @ wide(rhs[p]) for p in parts])


def test_transposed_ragged_dot():
    close(*transposed(steps=1), 0.02)


def test_a_pipeline_that_does_not_wait_for_its_products_is_a_race():
    """Two buffers: the copy of step 2 replaces what the product of step 0 reads."""
    with pytest.raises(errors.RaceError, match="while the wgmma may still read it"):
        transposed(steps=2)


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        ("attention", False),
        ("attention", True),
        ("attention_with_pipeline_emitter", False),
    ],
)
def test_attention(name, causal):
    module = ported("attention_mgpu")
    q, k, v = (normal((1, 128, 2, 64), jnp.float16, seed) for seed in range(3))
    config = module.TuningConfig(64, 64, 2, causal=causal)
    expected = module.attention_reference(q, k, v, causal=causal)
    close(getattr(module, name)(q, k, v, config), expected, 5e-3)


def test_the_derivative_of_attention():
    module = ported("attention_mgpu")
    q, k, v = (normal((1, 128, 1, 64), jnp.float16, seed) for seed in range(3))
    blocks = dict.fromkeys(
        ["block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"], 64
    )
    config = module.TuningConfig(64, 64, 2, **blocks)
    weights = wide(normal(q.shape, seed=3))

    def loss(f):
        return jax.grad(
            lambda *x: (f(*x).astype(jnp.float32) * weights).sum(), (0, 1, 2)
        )

    got = loss(lambda *x: module.attention(*x, config))(q, k, v)
    expected = loss(module.attention_reference)(q, k, v)
    for a, b in zip(got, expected, strict=True):
        close(a, b, 0.02)


def test_a_kernel_that_ends_before_its_copies_is_an_error():
    """The last copies of the last tile are not waited for; no wait is implied."""
    module = ported("blackwell_matmul_mgpu")
    config = module.TuningConfig(128, 128, 64, 3, collective=False)
    with pytest.raises(errors.KernelError, match=r"acc_smem.* is freed while the copy"):
        module.matmul_kernel(normal((256, 128)), normal((128, 256)), config)


@pytest.mark.parametrize(
    ("m", "tile_n", "collective"), [(256, 256, False), (512, 128, True)]
)
def test_blackwell_matmul_with_a_wait_for_its_last_copies(m, tile_n, collective):
    waits = "plgpu.wait_smem_to_gmem({}, wait_read_only=True)"
    module = ported("blackwell_matmul_mgpu", *(waits.format(n) for n in (1, 0)))
    config = module.TuningConfig(128, tile_n, 64, 2, collective=collective)
    a, b = normal((m, 128)), normal((128, 256), seed=1, scale=1 / 8)
    got = module.matmul_kernel(a, b, config)
    close(got, wide(a) @ wide(b), 0.02)


# Those that compute and move; fences and waits are as many as each package needs.
_TCGEN05 = re.compile(r"tcgen05\.(?!fence|wait)[\w.:]+")


@pytest.mark.offline
@pytest.mark.parametrize("collective", [False, True])
def test_blackwell_matmul_has_the_instructions_of_upstreams(collective):
    there = importlib.import_module(f"{installed.PLACE}.blackwell_matmul_mgpu")
    here = ported("blackwell_matmul_mgpu")

    def product(module):
        config = module.TuningConfig(128, 128, 64, 4, collective=collective)
        return functools.partial(module.matmul_kernel, config=config)

    def instructions(ptx):
        return collections.Counter(_TCGEN05.findall(ptx))

    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    expected = instructions(sides.upstream(arch.SM_100A).ptx(product(there), x, x))
    assert expected[f"tcgen05.mma.cta_group::{1 + collective}.kind::f16"] == 8
    for semantics in BOTH:
        made = under(semantics, product(here))
        (report,) = plgpu.offline.compile(made, x, x, target="sm_100a")
        assert instructions(report.ptx) == expected
        assert report.resources.spill_store_bytes == 0


def test_blackwell_ragged_dot():
    module = ported("blackwell_ragged_dot_mgpu")
    lhs, rhs = normal((512, 64)), normal((2, 64, 128), seed=1, scale=1 / 8)
    dims = module.blackwell_matmul_mgpu.MatmulDimension
    config = module.TuningConfig(128, 64, 64, 2, True, 1, dims.N)
    got = module.ragged_dot_kernel(lhs, rhs, jnp.asarray([100, 412], jnp.int32), config)
    ends = [wide(lhs[:100]) @ wide(rhs[0]), wide(lhs[100:]) @ wide(rhs[1])]
    close(got, np.concatenate(ends), 0.02)
