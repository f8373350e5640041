# SPDX-License-Identifier: Apache-2.0
"""Registers the TPU lowering of the kernel primitive: custom call or emulator."""

from __future__ import annotations

from typing import Any

import jax

from pallas_gpu import _jax, compiler, types
from pallas_gpu.arch import tpu
from pallas_gpu.entry import call
from pallas_gpu.lowering.machine import Build
from pallas_gpu.runtime.register import observe
from pallas_gpu.sparsecore.runtime import stages


def _launch(*args: Any, **params: Any) -> list[Any]:
    kernel = call.CallParams(**params)
    # A kernel is traced for a chip.
    options: Any = kernel.compiler_params
    target = tpu.target(options.target)
    build = compiler.run(Build(kernel, target), until="serialize", observe=observe)
    return jax.ffi.ffi_call(
        "tpu_custom_call",
        [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in kernel.out_avals],
        custom_call_api_version=1,
        has_side_effect=kernel.is_observable or options.has_side_effects,
        legacy_backend_config=stages.custom_call(build).config,
        input_output_aliases=dict(kernel.aliases),
    )(*args)


_custom_call_rule = _jax.mlir.lower_fun(_launch, multiple_results=True)


def _tpu_rule(ctx: Any, *args: Any, **params: Any) -> Any:
    of_another = "tpu" not in params["mesh"].platforms
    if of_another or isinstance(params["interpret"], types.InterpretParams):
        return call.ABOVE.emulator_lowering(ctx, *args, **params)
    return _custom_call_rule(ctx, *args, **params)


_jax.mlir.register_lowering(call.kernel_p, _tpu_rule, platform="tpu")
