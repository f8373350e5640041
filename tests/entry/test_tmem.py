# SPDX-License-Identifier: Apache-2.0
"""Scratch in tensor memory: what may be declared, and what is refused."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import arch, resources, types
from pallas_gpu.entry import trace
from tests.support.entry_kernels import f32, make, numbers, run
from tests.support.refusal import refused, refused_by

TILE = plgpu.TMEM((128, 64), jnp.bfloat16, packed=True)
BLACKWELL = plgpu.CompilerParams(target="sm_100a")
LAYOUT = "the default layout with 2 elements per column"


def test_a_scope_with_tmem_is_traced_with_its_declaration():
    def body(x, o):
        plgpu.run_scoped(lambda tile: None, TILE)

    arg = f32(64, 128)
    traced, _ = trace.trace_body(body, trace.Arrays.of([arg], [arg]), types.Mesh(), "k")
    (scope,) = resources.scopes(traced.jaxpr)
    (var,) = resources.scope_refs(scope.eqn)
    assert var.aval == TILE.to_ref()
    assert f"Ref<tmem>{{bf16[128,64], {LAYOUT}}}" in str(traced.jaxpr)
    assert resources.plan(traced.jaxpr, arch.SM_100A, "k", None, 1).tmem_columns == 32


def part_of(tile):
    return tile.at[:, 0:33]


def rows(tile):
    return tile.at[0:64]


def column(tile):
    return tile.at[:, 0]


@pytest.mark.parametrize("part", [part_of, rows, column])
@refused_by(
    lambda body: make(body, scratch_types=[TILE], compiler_params=BLACKWELL)(numbers())
)
def test_parts_are_ranges_of_columns(x, o, tile, *, part):
    plgpu.async_load_tmem(part(tile))


@refused_by(run, compiler_params=plgpu.CompilerParams(target="sm_90a"))
def test_hopper_has_no_tmem(x, o):
    plgpu.run_scoped(lambda tile: None, TILE)  # HERE


@pytest.mark.parametrize("cluster", [(), (1,), (3,)])
@refused
def test_a_collective_array_needs_pairs_of_ctas(cluster):
    def body(x, o):
        plgpu.run_scoped(lambda a: None, collective)  # HERE

    collective = plgpu.TMEM((128, 64), jnp.float32, collective=True)
    names = ("c",) * len(cluster)
    run(body, cluster=cluster, cluster_names=names, compiler_params=BLACKWELL)


@refused
def test_all_tmem_of_a_kernel_is_collective_or_none():
    def body(x, o):
        def outer(a):
            plgpu.run_scoped(lambda b: None, plain)  # HERE

        plgpu.run_scoped(outer, collective)

    plain = plgpu.TMEM((128, 64), jnp.float32)
    collective = plgpu.TMEM((128, 64), jnp.float32, collective=True)
    pair = {"cluster": (2,), "cluster_names": ("c",)}
    run(body, compiler_params=BLACKWELL, **pair)


@refused
def test_columns_beyond_those_of_the_target_are_an_error_with_the_table():
    def body(x, o, a, b, c):
        o[...] = x[...]

    wide = plgpu.TMEM((128, 256), jnp.float32)
    narrow = plgpu.TMEM((64, 18 * 16), jnp.bfloat16, packed=True)
    k = make(body, scratch_types=[wide, wide, narrow], compiler_params=BLACKWELL)
    k(numbers())
