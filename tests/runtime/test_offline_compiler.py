# SPDX-License-Identifier: Apache-2.0
"""Offline compilation: one call from bytes to text and figures."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_gpu import errors
from pallas_gpu.runtime import offline_compiler as offline
from pallas_gpu.runtime import ptx_stats, worker

pytestmark = pytest.mark.sass

AVAL = jax.ShapeDtypeStruct((128,), jnp.float32)


def compile_for(target: str, serialized, **kw) -> offline.CompiledModule:
    sizes = {"smem_bytes": 1024, "num_barriers": 0, "threads": 128} | kw
    return offline.compile_module(
        serialized,
        name="exp_plus_one",
        target=target,
        operand_avals=[AVAL],
        result_avals=[AVAL],
        **sizes,
    )


@pytest.mark.offline
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_each_target_gets_code_of_its_own(target, serialize_body):
    compiled = compile_for(target, serialize_body())
    assert f".target {target}" in compiled.ptx
    assert compiled.resources.target == target
    assert ptx_stats.instruction_counts(compiled.ptx)["ex2"] == 1


@pytest.mark.offline
def test_resources_join_ptxas_and_the_plan(serialize_body):
    resources = compile_for("sm_90a", serialize_body(), num_barriers=3).resources
    assert 0 < resources.registers_per_thread <= 32
    assert resources.spill_store_bytes == 0
    assert (resources.num_barriers, resources.smem_bytes) == (3, 1024)
    assert resources.occupancy_blocks_per_sm == 16


@pytest.mark.offline
def test_sass_comes_with_and_without_control_codes(serialize_body):
    compiled = compile_for("sm_90a", serialize_body())
    if compiled.sass is None:
        assert "nvdisasm" in compiled.note
        pytest.skip("nvdisasm is missing here")
    assert ":Y:" in compiled.sass_with_control
    assert ":Y:" not in compiled.sass
    assert compiled.sass.count("FADD") == compiled.sass_with_control.count("FADD") > 0


@pytest.mark.offline
def test_second_compile_of_one_module_is_cached(serialize_body, monkeypatch):
    first = compile_for("sm_90a", serialize_body())
    monkeypatch.setattr(worker.Worker, "compile", None)
    assert compile_for("sm_90a", serialize_body()) == first


@pytest.mark.offline
def test_device_code_is_kept_where_asked(serialize_body, monkeypatch, tmp_path):
    monkeypatch.setenv("PALLAS_GPU_KEEP", "ptx,ptxas")
    monkeypatch.setenv("PALLAS_GPU_DUMP_DIR", str(tmp_path))
    offline.keep_device_code(
        serialize_body(),
        name="exp_plus_one",
        target="sm_90a",
        operand_avals=[AVAL],
        result_avals=[AVAL],
    )
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["exp_plus_one.0.ptx", "exp_plus_one.0.ptxas"]


def test_code_that_cannot_be_kept_is_a_warning(serialize_body, monkeypatch):
    def unavailable(*_, **__):
        raise errors.OfflineUnavailableError("no CUDA packages")

    monkeypatch.setenv("PALLAS_GPU_KEEP", "sass")
    monkeypatch.setattr(worker.Worker, "compile", unavailable)
    with pytest.warns(UserWarning, match="cannot keep sass of kernel 'k': no CUDA"):
        offline.keep_device_code(
            serialize_body("math.absf %w : f32"),
            name="k",
            target="sm_90a",
            operand_avals=[AVAL],
            result_avals=[AVAL],
        )


def test_control_codes_are_stripped_and_nothing_else():
    sass = (
        "k:\n   -:-:-:Y:01        /*0000*/    LDC R1, c[0x0][0x28] \n"
        ".L_x_1:\n   0:3:2:-:06        /*0010*/    EXIT \n"
        " 2&1:-:-:Y:05        /*0020*/    BRA `(.L_x_1) \n"
    )
    assert offline.without_control_codes(sass) == (
        "k:\n        /*0000*/    LDC R1, c[0x0][0x28] \n"
        ".L_x_1:\n        /*0010*/    EXIT \n"
        "        /*0020*/    BRA `(.L_x_1) \n"
    )
