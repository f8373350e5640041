# SPDX-License-Identifier: Apache-2.0
"""The stages as data: each runs by itself, is verified, and leaves its texts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir

import pallas_gpu as plgpu
from pallas_gpu import arch, compiler, errors, offline
from pallas_gpu.emitters.module import make_context
from pallas_gpu.lowering.machine import Build
from tests.support.semantics import BOTH, Lane, Warpgroup

TYPE = jax.ShapeDtypeStruct((128, 128), jnp.float32)
TILED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


def body(x_ref, o_ref, tile, barrier):
    plgpu.copy_gmem_to_smem(x_ref.at[:64], tile, barrier)
    plgpu.barrier_wait(barrier)
    x = tile[...]
    # A reduction of all crosses warps: the plan changes while code is emitted.
    tile[...] = jnp.exp(x - x.max(axis=1, keepdims=True)) * x.sum()
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, o_ref.at[64:])
    plgpu.wait_smem_to_gmem(0)


def make(semantics, **options):
    return plgpu.kernel(
        body,
        out_type=TYPE,
        scratch_types=[plgpu.SMEM((64, 128), jnp.float32, transforms=TILED),
                       plgpu.Barrier()],
        name="stages",
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics, **options),
    )  # fmt: skip


def build_of(semantics) -> Build:
    (params,) = offline.kernels_called(make(semantics), (TYPE,), arch.SM_90A)
    return Build(params, arch.SM_90A)


def names() -> list[str]:
    return [stage.name for stage in compiler.STAGES]


def read_again(build: Build) -> Build:
    """The build with its module read from the module's text, and nothing else of it."""
    module = ir.Module.parse(str(build.module), make_context())
    return build.replace(module=module, launch=None)


@functools.cache
def all_at_once(semantics) -> tuple[str, bytes]:
    """The final module, and the bytes of what its text says."""
    build = compiler.lower(build_of(semantics).params, arch.SM_90A)
    done = compiler.run(read_again(build), after="barriers", until="serialize")
    return str(build.module), done.serialized.hash


@pytest.mark.parametrize("stage", ["host", "cse", "barriers", "serialize"])
@pytest.mark.parametrize("semantics", BOTH)
def test_a_stage_runs_from_the_text_of_the_one_before(stage, semantics):
    before = names()[names().index(stage) - 1]
    build = compiler.run(build_of(semantics), until=before)
    rest = compiler.run(read_again(build), after=before, until="serialize")
    assert (str(rest.module), rest.serialized.hash) == all_at_once(semantics)


def test_every_stage_from_the_rules_on_leaves_a_module_that_can_be_read():
    build = compiler.run(build_of(Warpgroup), until="layouts")
    assert build.module is None
    assert build.plan.smem_bytes
    for stage in compiler.STAGES[names().index("rules") :]:
        if stage.name == "compile":
            break
        build = compiler.run_stage(stage, build)
        assert read_again(build).module.operation.verify(), stage.name


def test_a_stage_is_verified_at_its_border():
    def spoil(build):
        with build.module.context, ir.Location.unknown():
            i32 = ir.IntegerType.get_signless(32)
            with ir.InsertionPoint(build.module.body):
                ir.Operation.create("arith.addi", results=[i32], operands=[])
        return build.replace(module=build.module)

    stage = compiler.Stage("spoil", spoil)
    build = compiler.run(build_of(Lane), until="rules")
    with pytest.raises(errors.CompilationError, match="rejects the module of kernel"):
        compiler.run_stage(stage, build)


def test_an_unknown_stage_is_refused_with_the_known_ones():
    with pytest.raises(errors.ArgumentError, match="unknown stage") as info:
        compiler.run(build_of(Lane), until="link")
    assert info.value.expected == "one of " + ", ".join(names())
    assert info.value.got == "'link'"


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_every_text_that_a_kernel_has_is_kept_under_its_name(
    semantics, monkeypatch, tmp_path
):
    monkeypatch.setenv("PALLAS_GPU_KEEP", ",".join(compiler.TEXTS))
    monkeypatch.setenv("PALLAS_GPU_DUMP_DIR", str(tmp_path))
    (report,) = offline.compile(make(semantics), TYPE)
    kept = {path.suffix[1:]: path.read_text() for path in tmp_path.iterdir()}
    assert kept["mlir"] == report.mlir
    assert kept["ptx"] == report.ptx
    # Bundles are those of SparseCores.
    missing = set() if semantics is Warpgroup else {"layouts", "annotated"}
    assert set(compiler.TEXTS) - set(kept) == missing | {"bundles"}
    assert "barrier" in kept["plan"]


def test_lines_are_kept_in_the_bytes_where_the_environment_asks_for_it(monkeypatch):
    monkeypatch.setenv("PALLAS_GPU_LINEINFO", "1")
    done = compiler.run(build_of(Lane), until="serialize")
    assert b"test_compiler.py" in done.serialized.bytecode
    monkeypatch.delenv("PALLAS_GPU_LINEINFO")
    done = compiler.run(build_of(Lane), until="serialize")
    assert b"test_compiler.py" not in done.serialized.bytecode


def test_reports_are_short_in_a_console():
    (report,) = offline.lower(make(Lane), TYPE)
    assert "tile" in report.jaxpr
    assert len(repr(report)) < 100
