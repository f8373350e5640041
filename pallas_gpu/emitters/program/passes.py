# SPDX-License-Identifier: Apache-2.0
"""Passes over a kernel's complete module, in place.

They depend only on the module: emitters represent work for the host or for the whole
kernel by tagged operations.
"""

from __future__ import annotations

from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import llvm

from pallas_gpu.emitters import module as module_lib
from pallas_gpu.emitters import tensor_map
from pallas_gpu.emitters.program import order


def lower_host_work(module: ir.Module, name: str = "") -> ir.Module:
    """Emits host code to initialize the TMA descriptors, erases the prologue's tag.

    Args:
      module: the kernel's module.
      name: of the kernel, for messages.
    """
    launch = module_lib.launch_of(module)
    body = launch.regions[0].blocks[0]
    host = launch.operation.block
    buffers = [op.result for op in host.operations if isinstance(op, llvm.LoadOp)]
    with module.context, ir.Location.unknown():
        tensor_map.lower_tensor_maps(module, launch.operation, body, buffers, name)
        if (tag := order.first_of(launch.operation, module_lib.PROLOGUE)) is not None:
            tag.erase()
    return module


def share_subexpressions(module: ir.Module) -> ir.Module:
    """Common subexpression elimination, which also removes dead code.

    The plugin canonicalizes; doing so here too gave the same PTX and took 10% more of
    the lowering's time.

    Raises:
      CompilationError: the module does not verify.
    """
    with module.context, ir.Location.unknown(), module_lib.refusals(module):
        passes = passmanager.PassManager.parse("builtin.module(cse)")
        # `KernelBuilder.finish`, which follows, verifies the module.
        passes.enable_verifier(False)
        passes.run(module.operation)
    return module
