# SPDX-License-Identifier: Apache-2.0
"""The cost model: what it counts in kernels, and how it ranks them."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import arch, compiler, errors, offline, ops, testing
from pallas_gpu.lowering.machine import Build
from pallas_gpu.testing.work import Counter, Work
from tests.support import everywhere

F32, BF16 = jnp.float32, jnp.bfloat16
TILE = plgpu.SMEM((64, 128), F32)


def work_of(kernel: Any, *avals: Any, **positions: int) -> Work:
    """The work of the first warpgroup of a CTA of a kernel."""
    (params,) = offline.launches(jax.make_jaxpr(kernel)(*avals))
    build = compiler.run(Build(params, arch.SM_90A), until="plan")
    counter = Counter(positions, dict(params.mesh.axes))
    return counter.count(build.params.jaxpr)


def copies(steps: Any) -> Any:
    """A kernel that loads a tile as often as `steps(i)` says, and stores it once."""

    def body(x, o, tile, loaded):
        @plgpu.loop(0, steps(jax.lax.axis_index("i")))
        def _(_):
            plgpu.copy_gmem_to_smem(x, tile, loaded)
            plgpu.barrier_wait(loaded)

        plgpu.copy_smem_to_gmem(tile, o)
        plgpu.wait_smem_to_gmem(0)

    return everywhere.kernel(body, X, TILE, plgpu.Barrier(), grid={"i": 4})()


X = jax.ShapeDtypeStruct((64, 128), F32)
TILE_BYTES = 64 * 128 * 4


@pytest.mark.parametrize("steps", [0, 1, 3, 100])
def test_a_loop_of_known_length_counts_as_often(steps):
    work = work_of(copies(lambda i: steps), X)
    assert work.loaded_bytes == work.filled_bytes == steps * TILE_BYTES
    assert work.stored_bytes == TILE_BYTES
    assert work.waits == steps


LENGTHS = {
    "of a position": (lambda i: 10 * i + 1, {"i": 3}, 31),
    "of position 0": (lambda i: 10 * i + 1, {"i": 0}, 1),
    "unknown": (lambda i: i, {}, 1),
}


@pytest.mark.parametrize(("steps", "positions", "times"), LENGTHS.values(), ids=LENGTHS)
def test_a_loop_counts_as_often_as_is_known_else_once(steps, positions, times):
    assert work_of(copies(steps), X, **positions).loaded_bytes == times * TILE_BYTES


def test_a_branch_on_an_unknown_condition_counts_as_the_most_expensive():
    def body(x, o):
        @plgpu.when(x[0, 0] > 0)
        def _():
            o[...] = jnp.exp(x[...])

    work = work_of(plgpu.kernel(body, out_type=X), X)
    assert work.stored_bytes == TILE_BYTES
    assert work.elements >= 64 * 128


def test_a_branch_on_a_position_is_taken_or_not():
    def body(x, o):
        @plgpu.when(jax.lax.axis_index("i") == 2)
        def _():
            o[...] = x[...]

    k = everywhere.kernel(body, X, grid={"i": 4})()
    assert work_of(k, X, i=1).stored_bytes == 0
    assert work_of(k, X, i=2).stored_bytes == TILE_BYTES


@pytest.mark.parametrize("of_index", [lambda i: i == 15, lambda i: i % 4 == 1])
def test_a_branch_in_a_loop_counts_as_often_as_it_is_taken(of_index):
    def body(x, o):
        @plgpu.loop(0, 16)
        def _(i):
            @plgpu.when(of_index(i))
            def _():
                o[...] = x[...]

    taken = sum(map(of_index, range(16)))
    assert work_of(plgpu.kernel(body, out_type=X), X).stored_bytes == taken * TILE_BYTES


def matmul(a, b, config):
    return ops.matmul(a, b, config=config)


SMALL = ops.MatmulConfig(tile_m=64, tile_n=64, cluster=None, epilogue_n=32)
LARGE = ops.MatmulConfig(tile_m=128, tile_n=128, cluster=None)


def operands(m: int, n: int, k: int) -> list[Any]:
    return [jax.ShapeDtypeStruct(s, BF16) for s in ((m, k), (k, n))]


def test_the_work_of_a_product_is_that_of_its_tiles():
    (found,) = testing.rank(matmul, [LARGE], *operands(512, 512, 256))
    assert found.flops == pytest.approx(2 * 512 * 512 * 256)
    # Two columns of tiles of 256 rows: each element of A is loaded 4 times, of B twice.
    assert found.loaded_bytes == pytest.approx(2 * (512 * 256 * 4 + 256 * 512 * 2))
    assert found.stored_bytes == pytest.approx(2 * 512 * 512)


def test_multicast_divides_what_is_loaded():
    both = [LARGE, ops.MatmulConfig(cluster="n")]
    plain, shared = sorted(
        testing.rank(matmul, both, *operands(512, 512, 256)),
        key=lambda e: e.config.cluster or "",
    )
    saved = 2 * 512 * 256 * 4 / 2  # half of A
    assert plain.loaded_bytes - shared.loaded_bytes == pytest.approx(saved)


def test_large_tiles_win_on_large_products_and_small_ones_on_small_products():
    configs = [SMALL, LARGE]
    assert testing.rank(matmul, configs, *operands(4096, 4096, 4096))[0].config == LARGE
    assert testing.rank(matmul, configs, *operands(1024, 1024, 1024))[0].config == SMALL


def test_a_large_product_is_near_what_the_card_can_do():
    (found,) = testing.rank(matmul, [LARGE], *operands(8192, 8192, 8192))
    assert 0.8 < found.seconds / (2 * 8192**3 / 810e12) < 1.25


def test_causal_attention_takes_less_than_all_of_it():
    q = jax.ShapeDtypeStruct((1, 4096, 4, 64), BF16)
    times = {
        causal: testing.rank(attention, [causal], q, q, q)[0].flops
        for causal in (False, True)
    }
    assert 0.4 < times[True] / times[False] < 0.8


def attention(q, k, v, config):
    return ops.attention(q, k, v, causal=config)


def test_what_does_not_trace_is_last_with_its_reason():
    wide = ops.MatmulConfig(tile_n=256, stages=8)
    odd = "odd"

    def product(a, b, config):
        if config == odd:
            raise errors.ShapeError("the tiles do not fit", expected="even", got="odd")
        return matmul(a, b, config)

    first, *others = testing.rank(product, [odd, wide, LARGE], *operands(512, 512, 512))
    assert first.config == LARGE
    assert [math.isinf(e.seconds) for e in others] == [True, True]
    reasons = {e.config: e.reason for e in others}
    assert reasons[wide].startswith("OutOfResources: ")
    assert reasons[odd] == "ShapeError: the tiles do not fit"


def test_registers_that_are_set_limit_the_ctas_of_an_sm():
    def body(x, o, *, registers):
        plgpu.set_max_registers(registers, action="increase")
        o[...] = x[...]

    def f(x, *, config):
        call = functools.partial(body, registers=config)
        return plgpu.kernel(call, out_type=X, name="k")(x)

    found = {e.config: e.ctas_per_sm for e in testing.rank(f, [240, 64], X)}
    assert found[240] == 2
    assert found[64] == 8


def test_the_target_is_an_argument():
    with pytest.raises(errors.TargetError, match="unknown target"):
        testing.rank(matmul, [LARGE], *operands(512, 512, 512), target="sm_80")
    config = ops.BlackwellMatmulConfig()
    hopper, blackwell = (
        testing.rank(matmul, [config], *operands(2048, 2048, 512), target=target)[0]
        for target in ("sm_90a", "sm_100a")
    )
    assert "TargetError" in hopper.reason
    assert blackwell.flops > 0


def test_a_function_without_kernels_costs_nothing():
    (found,) = testing.rank(lambda x, config: x + config, [1], X)
    assert (found.seconds, found.bound) == (0.0, "")


def test_a_function_is_ranked_as_the_kernel_of_the_target():
    seen = []

    def product(a, b, config):
        seen.append(plgpu.offline.current_target())
        return ops.matmul(a, b, transpose_b=config)

    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    (found,) = testing.rank(product, [False], x, x, target="sm_100a")
    assert math.isfinite(found.seconds), found.reason
    assert seen == ["sm_100a"]


EFFECTS = {
    "testing.rank.args": "test_the_work_of_a_product_is_that_of_its_tiles",
    "testing.rank.target": "test_the_target_is_an_argument",
}
