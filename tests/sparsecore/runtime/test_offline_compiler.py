# SPDX-License-Identifier: Apache-2.0
"""libtpu compiles modules in a child process: what it makes, and what it refuses."""

from __future__ import annotations

import contextlib
import functools

import jax
import numpy as np
import pytest

from pallas_gpu import errors
from pallas_gpu.arch import tpu
from pallas_gpu.runtime import store
from pallas_gpu.sparsecore.runtime import offline_compiler, serialize
from tests.support.sparsecore import modules
from tests.support.sparsecore.modules import SMEM, VMEM, needs_libtpu

F32, I32 = (
    functools.partial(jax.ShapeDtypeStruct, dtype=d) for d in ("float32", "int32")
)
ROWS, WIDTH, COUNT = 1024, 128, 512


def _through(body: str = "", target: str = "tpu7x", n: int = 128, **options):
    text = modules.through(body, n=n, **options)
    return modules.compiled(text, [F32((n,))], [F32((n,))], target)


@needs_libtpu
@pytest.mark.parametrize("chip", modules.CHIPS)
def test_a_gather_becomes_streams_and_a_loop_of_one_bundle_a_vector(chip):
    target = tpu.target(chip)
    text = modules.gather(ROWS, WIDTH, COUNT, target.lanes)
    operands = [F32((ROWS, WIDTH)), I32((COUNT,))]
    program = modules.compiled(text, operands, [F32((COUNT, WIDTH))], chip)
    code = program.vector
    mine = COUNT // 16
    assert [(s.kind, s.source, s.target, s.bytes) for s in code.streams] == [
        ("stream.linear.gather", "hbm4b", "tilespmem", 4 * mine),
        ("stream.indirect.gather", "hbm4b", "tilespmem", None),
        ("stream.linear.scatter", "tilespmem", "hbm4b", 4 * mine * WIDTH),
    ]
    (loop,) = code.loops
    assert loop.loads == loop.stores == WIDTH // target.lanes
    assert loop.bundles_per_vector == 1
    # The two streams in, the one out, and the frame's.
    assert len(code.waits) == 4
    assert len(code.barriers) == 2


@needs_libtpu
@pytest.mark.parametrize("chip", modules.CHIPS)
def test_a_scatter_add_becomes_a_stream_that_adds_between_barriers(chip):
    text = modules.scatter_add(2048, WIDTH, 1024, tpu.target(chip).lanes)
    operands = [F32((1024, WIDTH)), I32((1024,))]
    code = modules.compiled(text, operands, [F32((2048, WIDTH))], chip).vector
    kinds = [stream.kind for stream in code.streams]
    assert kinds.count("stream.indirect.scatter.add.f32") == 1
    assert kinds[-1] == "dma.local"
    assert len(code.barriers) == 4


@needs_libtpu
def test_a_scalar_kernel_has_no_vector_code():
    row = [I32((1, 128))]
    program = modules.compiled(modules.prefix_sum(128), row, row)
    assert program.vector is None
    assert [(s.kind, s.source, s.target, s.bytes) for s in program.scalar.streams] == [
        ("dma.local", "hbm", "smem", 512),
        ("dma.local", "smem", "hbm", 512),
    ]
    (loop,) = program.scalar.loops
    assert loop.loads == loop.stores == 0


def _vector(operation: str, elements: int = 16) -> str:
    v = f"vector<{elements}xf32>"
    at = f"{{strides = array<i32>}} : memref<128xf32, {VMEM}>, {v},"
    return f"""
    %v = tpu.vector_load %buf[%i0] {at}
    %w = {operation} : {v}
    tpu.vector_store %buf[%i0], %w {at}
"""


_SCALAR_LOAD = f"""
    %e = memref.load %buf[%i0] : memref<128xf32, {VMEM}>
    memref.store %e, %buf[%i0] : memref<128xf32, {VMEM}>
"""
_REFUSED = {
    "a vector that is no register": (_vector("arith.addf %v, %v", 24), "vreg"),
    "a scalar in VMEM": (_SCALAR_LOAD, "smem"),
    "exp2": (_vector("math.exp2 %v"), "exp2"),
}


@needs_libtpu
@pytest.mark.parametrize("case", _REFUSED)
def test_what_libtpu_refuses_is_an_error_with_its_reason(case):
    body, reason = _REFUSED[case]
    with pytest.raises(errors.CompilationError, match="does not compile") as info:
        _through(body)
    assert reason in str(info.value.got)
    assert "=== Source Location Trace" not in str(info.value.got)


@needs_libtpu
def test_more_vmem_than_a_subcore_has_is_refused():
    _through(n=tpu.V6E.vmem_words - 8192, target="v6e")
    with pytest.raises(errors.CompilationError, match="E3000"):
        _through(n=tpu.V6E.vmem_words + 128, target="v6e")


@needs_libtpu
def test_the_process_survives_when_libtpu_ends_its_own():
    row = [F32((1, 128))]
    # libtpu: "Cannot select" a division of scalars on the scalar subcore.
    with pytest.raises(errors.CompilationError, match=r"died \(SIG\w+\)") as info:
        modules.compiled(modules.prefix_sum(128, operation="arith.divf"), row, row)
    assert "LLVM ERROR: Cannot select" in info.value.got
    good = modules.prefix_sum(128, operation="arith.addf")
    assert modules.compiled(good, row, row).scalar.loops


@needs_libtpu
def test_the_texts_of_all_passes_are_kept():
    more = f"%m: memref<8xi32, {SMEM}>"
    text = modules.through(more=more)
    row = [F32((128,))]
    modules.compiled(text, row, row)
    bytecode = serialize.serialize(serialize.parse(text))
    call = modules.CustomCall(modules.config_text(bytecode, cores=1), (0,), (0,))
    kernel = offline_compiler.compile_kernel(
        [call],
        name="kernel",
        target="v5p",
        operands=[((128,), "float32")],
        results=[((128,), "float32")],
    )
    names = [name for name, _ in kernel.passes]
    assert any("lower-to-mlo" in name for name in names)
    assert "tpu_custom_call" in kernel.hlo
    assert any("llvm.tpu.allocate.tilespmem" in text for _, text in kernel.llvm)
    assert kernel.code_bytes > 0


@needs_libtpu
def test_what_is_compiled_is_stored_for_other_processes(monkeypatch, tmp_path):
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path))
    target, n = tpu.target("v6e"), 256
    config = modules.config_text(
        serialize.serialize(serialize.parse(modules.through(n=n))), cores=1
    )
    arguments = (
        (modules.CustomCall(config, (0,), (0,)),), "kernel", target,
        (((n,), "float32"),), (((n,), "float32"),),
    )  # fmt: skip
    compile_once = offline_compiler._compile_once.__wrapped__
    with contextlib.closing(offline_compiler.TpuWorker()) as using:
        first = compile_once(using, *arguments)
        assert using.pid is not None
    other = offline_compiler.TpuWorker()
    again = compile_once(other, *arguments)
    assert other.pid is None
    assert again.texts == first.texts and again.passes == first.passes
    monkeypatch.setattr(offline_compiler, "_compiler", lambda: ["another libtpu"])
    monkeypatch.setattr(other, "request", lambda *_: {"result": None})
    with pytest.raises(TypeError):
        compile_once(other, *arguments)


def test_without_libtpu_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(offline_compiler, "is_available", lambda: False)
    using = offline_compiler.TpuWorker()
    with pytest.raises(errors.OfflineUnavailableError, match="libtpu") as info:
        using.request({}, "kernel")
    assert "pallas-gpu[tpu]" in info.value.hint


def test_equal_modules_have_equal_bytes():
    text = modules.gather(ROWS, WIDTH, COUNT, 16)
    first, second = (serialize.serialize(serialize.parse(text)) for _ in range(2))
    assert first == second
    assert np.frombuffer(first[:4], np.uint8).tolist() == [0x4D, 0x4C, 0xEF, 0x52]


def test_a_text_that_is_not_a_module_is_refused():
    with pytest.raises(errors.CompilationError, match="not a valid module"):
        serialize.parse(modules.through(_vector("arith.frob %v")))
