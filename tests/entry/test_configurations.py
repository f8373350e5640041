# SPDX-License-Identifier: Apache-2.0
"""JAX's own options and contexts around kernels: checks, x64, shard_map.

The smoke set runs with `jax_enable_checks` on (tests/conftest.py).
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as upstream

import pallas_gpu as plgpu
from pallas_gpu import _jax
from pallas_gpu.entry import call
from tests.support import everywhere
from tests.support.entry_kernels import f32, make, numbers
from tests.support.refusal import refused_by

ROWS = plgpu.BlockSpec((32, 128), lambda i: (i, 0))
SHIFT = np.repeat(np.arange(2, dtype=np.float32), 32)[:, None]


def by_kernel():
    def body(x, o):
        rows = plgpu.ds(lax.axis_index("i") * 32, 32)
        o[rows] = x[rows] * 2 + lax.axis_index("i")

    return make(body, grid=(2,), grid_names=("i",))


def by_pallas_call():
    def body(x, o):
        o[...] = x[...] * 2 + plgpu.program_id(0)

    return plgpu.pallas_call(body, f32(), grid=2, in_specs=[ROWS], out_specs=ROWS)


both = pytest.mark.parametrize("entry", [by_kernel, by_pallas_call])


# --- jax_enable_checks ----------------------------------------------------------------


def with_a_rule(k):
    f = jax.custom_vjp(k)
    f.defvjp(lambda x: (k(x), None), lambda _, g: (k(g),))
    return f


@both
@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        lambda k: jax.vmap(lambda x: k(x), axis_size=2, in_axes=None),
        lambda k: jax.grad(lambda x: with_a_rule(k)(x).sum()),
        lambda k: lambda x: lax.scan(lambda c, _: (k(c), None), x, length=2)[0],
        jax.checkpoint,
    ],
    ids=["jit", "vmap", "grad", "scan", "checkpoint"],
)
def test_jax_can_check_the_types_of_a_kernel_with_named_axes(entry, transform):
    with jax.enable_checks(True):
        jaxpr = jax.make_jaxpr(jax.jit(transform(entry())))(numbers())
    assert "pallas_gpu_kernel" in str(jaxpr)


def test_jax_can_check_loops_branches_scopes_and_warps():
    def body(x, o, barriers):
        @plgpu.loop(0, 2)
        def _(i):
            @plgpu.when(lax.axis_index("wg") == i)
            def _():
                plgpu.barrier_arrive(barriers.at[i])
                plgpu.barrier_wait(barriers.at[i])

        @plgpu.warp_map
        def _(warp):
            o[warp + 4 * lax.axis_index("wg")] = x[warp, 0]

    barriers = plgpu.Barrier(num_barriers=2)
    k = everywhere.kernel(body, f32(8), barriers, threads={"wg": 2})(None)
    with jax.enable_checks(True):
        got = jax.jit(k)(numbers())
    np.testing.assert_array_equal(got, np.tile(numbers()[:4, 0], 2))


# --- compiled calls -------------------------------------------------------------------


@pytest.fixture
def compiled_calls(monkeypatch):
    """Eager calls are compiled, as on a GPU; the program calls the emulator."""
    monkeypatch.setattr(call, "platform_of", lambda _: "gpu")


def logarithm(x, o):
    o[...] = jnp.log(x[...])


@pytest.mark.parametrize("jit", [False, True])
def test_a_nan_in_the_result_of_a_compiled_call_is_found(compiled_calls, jit):
    k = make(logarithm)
    with (
        jax.debug_nans(True),
        pytest.raises(FloatingPointError, match=r"\(nan\) encountered in kernel log"),
    ):
        (jax.jit(k) if jit else k)(numbers() - 5)


def test_a_compiled_call_stays_one_where_jit_is_disabled(compiled_calls):
    with jax.disable_jit():
        result = make(lambda x, o: o.set(x[...] * 2))(numbers())
    np.testing.assert_array_equal(result, 2 * numbers())


# --- shard_map ------------------------------------------------------------------------


def abstract_mesh(*names):
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.sharding.AbstractMesh((2,) * len(names), names, axis_types=auto)


@both
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_kernel_in_a_shard_map(entry, check_vma):
    mesh = abstract_mesh("d")
    spec = jax.P("d")
    f = jax.shard_map(
        entry(), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    with jax.enable_checks(True):
        (result,) = jax.make_jaxpr(f)(numbers(128, 128)).out_avals
    assert result.shape == (128, 128)


def test_results_vary_over_the_axes_of_any_operand():
    k = make(lambda x, y, o: o.set(x[...] + y[...]))
    mesh = abstract_mesh("d", "e")
    seen = []

    def local(x, y):
        result = k(x, y)
        seen.append(jax.typeof(result).manual_axis_type.varying)
        return result

    specs = (jax.P("d"), jax.P(None, "e"))
    jax.make_jaxpr(
        jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P("d", "e"))
    )(numbers(128, 128), numbers(64, 256))
    assert seen == [{"d", "e"}]


def test_results_that_vary_are_not_taken_for_replicated_ones():
    mesh = abstract_mesh("d")
    f = jax.shard_map(by_kernel(), mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P())
    with pytest.raises(ValueError, match="out_specs"):
        jax.make_jaxpr(f)(numbers(128, 128))


def test_a_shard_map_over_two_devices():
    program = """
        import jax, numpy as np
        from tests.entry import test_configurations as t
        mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        x = t.numbers(128, 128)
        for entry in (t.by_kernel, t.by_pallas_call):
            f = jax.shard_map(
                entry(), mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d")
            )
            for g in (f, jax.jit(f)):
                np.testing.assert_array_equal(g(x), 2 * x + np.tile(t.SHIFT, (2, 1)))
        """
    subprocess.run(
        [sys.executable, "-c", "import jax; jax.config.update('jax_num_cpu_devices', 2)"
         + textwrap.dedent(program)],
        check=True,
    )  # fmt: skip


# --- functions of JAX's Pallas --------------------------------------------------------


@pytest.mark.parametrize("function", ["program_id", "num_programs"])
@refused_by(lambda body: make(body, grid=(2,), grid_names=("i",))(numbers()))
def test_a_position_of_upstream_is_refused(x, o, *, function):
    o[...] = x[...] * getattr(upstream, function)(0)  # HERE


# --- x64 ------------------------------------------------------------------------------


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def test_positions_and_loops_are_32_bit_under_x64(x64):
    def body(o):
        @plgpu.nd_loop((2, 2), collective_axes="i")
        def _(info):
            @plgpu.loop(0, 4)
            def _(k):
                i, j = info.index
                place = plgpu.planar_snake(2 * i + j, (2, 2), 1, 1)
                indices = (info.local_index, k, *info.index, *place)
                assert {x.dtype for x in indices} == {jnp.dtype(jnp.int32)}
                o[i, j, k] = place[0] * 100 + place[1] * 10 + k

    expected = np.array([[0, 100], [110, 10]])[..., None] + np.arange(4)
    everywhere.run(body, [], expected.astype(np.int32), grid={"i": 3})


def test_64_bit_indices_of_copies_barriers_and_slices_under_x64(x64):
    def body(x, o, tiles, barriers):
        def step(i, total):
            slot = i % 2
            assert slot.dtype == jnp.int64
            rows = plgpu.ds(i * 16, 16)
            plgpu.copy_gmem_to_smem(x.at[rows], tiles.at[slot], barriers.at[slot])
            plgpu.barrier_wait(barriers.at[slot])
            o[rows] = tiles[slot] * 2.5 + i
            return total

        lax.fori_loop(0, 4, step, 0)

    expected = numbers() * 2.5 + np.repeat(np.arange(4), 16)[:, None]
    scratch = plgpu.SMEM((2, 16, 128), jnp.float32), plgpu.Barrier(num_barriers=2)
    everywhere.run(body, [jnp.asarray(numbers())], expected, *scratch, out=f32())


@both
def test_entry_points_under_x64(x64, entry):
    k = entry()
    for f in (k, jax.jit(k), lambda x: jax.vmap(k)(x[None])[0]):
        np.testing.assert_array_equal(f(numbers()), numbers() * 2 + SHIFT)
    assert plgpu.offline.lower(k, numbers())


# --- options that check a program -----------------------------------------------------


@pytest.mark.parametrize(
    "option",
    [
        lambda: jax.transfer_guard("disallow"),
        lambda: jax.debug_nans(True),
        lambda: jax.debug_infs(True),
        lambda: jax.numpy_rank_promotion("raise"),
        lambda: jax.numpy_dtype_promotion("strict"),
        jax.disable_jit,
        jax.checking_leaks,
    ],
    ids=["transfers", "nans", "infs", "ranks", "dtypes", "no-jit", "leaks"],
)
@pytest.mark.parametrize("jit", [False, True])
def test_options_that_check_a_program_do_not_check_the_emulator(option, jit):
    def body(x, o, tile):
        tile[...] = x[...] / 0.0

        @plgpu.loop(0, 2)
        def _(i):
            rows = plgpu.ds(i * 32, 32)
            row = jnp.sum(tile[rows] * 0.0, axis=1) + jnp.inf
            o[rows] = jnp.where(row[:, None] == row[:, None], tile[rows], 1.0)

    k = make(body, scratch_types=[plgpu.SMEM((64, 128), jnp.float32)])
    x = jax.device_put(numbers())
    with option():
        result = (jax.jit(lambda x: k(x)[:0]) if jit else k)(x)
        assert len(plgpu.offline.lower(k, x)) == 1
    if not jit:
        np.testing.assert_array_equal(result, np.ones((64, 128), np.float32))


def test_the_package_needs_no_implicit_promotion_of_types():
    primitives = _jax._primitives_by_name.__wrapped__
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert "scan" in primitives()


def test_a_loop_of_a_kernel_is_a_loop_where_jit_is_disabled():
    def body(x, o):
        o[...] = lax.fori_loop(0, 3, lambda i, y: y + x[i, 0] * i.astype(y.dtype), x[0])

    with jax.disable_jit():
        (report,) = plgpu.offline.lower(make(body, f32(128)), numbers())
    assert "scan" in report.jaxpr
