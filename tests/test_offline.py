# SPDX-License-Identifier: Apache-2.0
"""The public offline compiler: one report a kernel, for the target asked for."""

import re

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def scaled(factor, name, **params):
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] * factor

    return plgpu.kernel(
        body, out_type=X, name=name, compiler_params=plgpu.CompilerParams(**params)
    )


def two_kernels(x):
    def step(carry, _):
        return scaled(2.0, "double")(carry), None

    y, _ = jax.lax.scan(step, x, None, length=3)
    return scaled(3.0, "triple")(y)


@pytest.mark.smoke
def test_every_kernel_of_a_program_is_lowered():
    reports = plgpu.offline.lower(jax.jit(two_kernels), X)
    assert [r.name for r in reports] == ["double", "triple"]
    assert all("gpu.launch" in r.mlir and "mul" in r.jaxpr for r in reports)


@pytest.mark.offline
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_a_report_has_ptx_and_resources_for_its_target(target):
    (report,) = plgpu.offline.compile(scaled(2.0, "double"), X, target=target)
    assert f".target {target}" in report.ptx
    assert report.resources.spill_store_bytes == 0
    assert report.resources.threads_per_block == 128
    assert report.instruction_counts["mul"] > 0


@pytest.mark.offline
def test_stages_are_kept_where_they_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLAS_GPU_KEEP", "jaxpr,mlir,ptx")
    monkeypatch.setenv("PALLAS_GPU_DUMP_DIR", str(tmp_path))
    plgpu.offline.compile(scaled(5.0, "kept"), X)
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"kept.0.jaxpr", "kept.0.mlir", "kept.0.ptx"}
    assert ".version" in (tmp_path / "kept.0.ptx").read_text()


def test_a_function_without_kernels_is_refused():
    with pytest.raises(plgpu.errors.ArgumentError, match="does not call a kernel"):
        plgpu.offline.lower(lambda x: x + 1, X)


@pytest.mark.offline
def test_a_kernel_that_asks_for_another_target_is_refused():
    with pytest.raises(
        plgpu.errors.TargetError, match="is declared for another target"
    ):
        plgpu.offline.compile(scaled(2.0, "double", target="sm_100a"), X)


def test_an_unknown_target_lists_the_known_ones():
    with pytest.raises(plgpu.errors.TargetError, match="sm_90a or sm_100a"):
        plgpu.offline.lower(scaled(2.0, "double"), X, target="sm_80")


def test_both_semantics_give_the_code_of_a_thread():
    for semantics in plgpu.LoweringSemantics:
        function = scaled(2.0, "double", lowering_semantics=semantics)
        (report,) = plgpu.offline.lower(function, X)
        assert "vector<4xf32>" in report.mlir
        assert "mosaic_gpu." not in report.mlir.replace("mosaic_gpu.arch", "")


NAMES = ["été", "日本語", "<lambda>", "a b\n", "3d", "x" * 5000, "\ud800", ""]


@pytest.mark.parametrize("name", NAMES)
def test_symbols_are_identifiers_of_ptx_whatever_the_kernels_name(name):
    (report,) = plgpu.offline.lower(scaled(2.0, name), X)
    symbols = re.findall(r'@"?([^"\s(]+_mosaic_gpu)', report.mlir)
    assert symbols and all(re.fullmatch(r"[A-Za-z_]\w*", s, re.A) for s in symbols)


@pytest.mark.offline
def test_a_kernel_with_a_name_beyond_ascii_compiles():
    (report,) = plgpu.offline.compile(scaled(2.0, "été"), X)
    assert report.name == "été"
    assert ".entry _t__mosaic_gpu_kernel" in report.ptx


# --- the target decides what is traced ------------------------------------------------

HALF = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
HEADS = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
CHOOSING = {
    "matmul": (plgpu.ops.matmul, HALF, HALF),
    "jitted": (jax.jit(plgpu.ops.matmul), HALF, HALF),
    "attention": (plgpu.ops.attention, HEADS, HEADS, HEADS),
}


@pytest.mark.parametrize("call", CHOOSING.values(), ids=CHOOSING)
def test_ready_kernels_are_those_of_the_target(call):
    for target, own in (("sm_90a", "wgmma"), ("sm_100a", "tcgen05"), ("sm_90a", "wgm")):
        reports = plgpu.offline.lower(*call, target=target)
        assert own in reports[0].jaxpr, target
        assert {r.target for r in reports} == {target}


def test_a_kernel_without_a_target_may_use_what_the_target_has():
    def body(out, acc):
        out[...] = plgpu.async_load_tmem(acc)

    def f():
        scratch = [plgpu.TMEM((128, 128), jnp.float32)]
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((128, 128), jnp.float32),
            scratch_types=scratch,
        )()

    (report,) = plgpu.offline.lower(f, target="sm_100a")
    assert "tcgen05" in report.mlir
    with pytest.raises(plgpu.errors.TargetError, match="sm_90a"):
        plgpu.offline.lower(f, target="sm_90a")


def test_functions_can_ask_for_the_target():
    seen = []

    def choosing(x):
        seen.append(plgpu.offline.current_target())
        return scaled(2.0, "double")(x)

    plgpu.offline.lower(choosing, X, target="sm_100a")
    choosing(jnp.ones(X.shape))
    assert seen == ["sm_100a", None]
