# SPDX-License-Identifier: Apache-2.0
"""A small module, written by hand, that stands for a lowered kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from jax.interpreters import mlir
from jaxlib.mlir import ir

from pallas_gpu.runtime import serialize

# o[i] = exp(x[i] + 1) by 128 threads; exp comes from libdevice.
MODULE = """
module @NAME {
  llvm.mlir.global external @global_scratch() {addr_space = 4 : i32}
      : !llvm.array<0 x i8>
  func.func @NAME_mosaic_gpu(%token: !llvm.ptr, %buffers: !llvm.ptr)
      attributes {llvm.emit_c_interface} {
    %start = builtin.unrealized_conversion_cast %token : !llvm.ptr to !gpu.async.token
    %x = llvm.load %buffers : !llvm.ptr -> !llvm.ptr
    %second = llvm.getelementptr %buffers[1] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
    %o = llvm.load %second : !llvm.ptr -> !llvm.ptr
    %c1 = arith.constant 1 : index
    %c128 = arith.constant 128 : index
    %smem = arith.constant 1024 : i32
    %end = gpu.launch async [%start]
        blocks(%bx, %by, %bz) in (%gx = %c1, %gy = %c1, %gz = %c1)
        threads(%tx, %ty, %tz) in (%sx = %c128, %sy = %c1, %sz = %c1)
        dynamic_shared_memory_size %smem {
      %i = arith.index_cast %tx : index to i32
      %from = llvm.getelementptr %x[%i] : (!llvm.ptr, i32) -> !llvm.ptr, f32
      %to = llvm.getelementptr %o[%i] : (!llvm.ptr, i32) -> !llvm.ptr, f32
      %v = llvm.load %from : !llvm.ptr -> f32
      %one = arith.constant 1.0 : f32
      %w = arith.addf %v, %one : f32
      %r = BODY
      llvm.store %r, %to : f32, !llvm.ptr
      gpu.terminator
    }
    return
  }
}
"""
EXP = "math.exp %w : f32"


@pytest.fixture(autouse=True)
def without_store(monkeypatch):
    """What is tested here compiles: nothing is read from the developer's store."""
    monkeypatch.setenv("PALLAS_GPU_COMPILATIONS_DIR", "off")


@pytest.fixture(scope="session")
def parse_module() -> Callable[..., ir.Module]:
    """Parses the module, in a context of its own, with another body or name."""

    def parse(body: str = EXP, name: str = "exp_plus_one") -> ir.Module:
        context = mlir.make_ir_context()
        serialize.register_dialect(context)
        with context:
            text = MODULE.replace("NAME", name).replace("BODY", body)
            return ir.Module.parse(text)

    return parse


@pytest.fixture(scope="session")
def serialize_body(parse_module) -> Callable[..., serialize.SerializedModule]:
    """The module, parsed and serialized."""

    def build(body: str = EXP, name: str = "exp_plus_one"):
        return serialize.serialize(parse_module(body, name))

    return build
