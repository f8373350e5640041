# SPDX-License-Identifier: Apache-2.0
"""The call of a kernel that XLA compiles: `mosaic_gpu_v2` through JAX's public FFI."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from pallas_gpu.runtime import environment
from pallas_gpu.runtime.serialize import SerializedModule

CALL_TARGET = "mosaic_gpu_v2"
# The attributes that the target requires, of a kernel of one device.
ONE_DEVICE: dict[str, Any] = {
    "use_custom_barrier": False,
    "skip_device_barrier": False,
    "uses_xla_collective_metadata": False,
}


def call(
    arrays: Sequence[jax.Array],
    result_types: Sequence[jax.ShapeDtypeStruct],
    serialized: SerializedModule,
    *,
    attributes: Mapping[str, Any] | None = None,
    has_side_effect: bool = False,
    input_output_aliases: Mapping[int, int] | None = None,
) -> list[jax.Array]:
    """Runs a serialized module on the GPU as one XLA custom call.

    The module's host function receives the operands' buffers, then the results', all
    row-major. The call can be traced: under `jax.jit` it is one operation, and XLA's
    CUDA plugin compiles the module together with the program.

    Args:
      arrays: operands, in the order of the module's first buffers.
      serialized: the result of `serialize`.
      attributes: others of the call than those of a kernel of one device.
      has_side_effect: keep the call even if no result is used.
      input_output_aliases: operand index to result index, for results that reuse the
        buffer of an operand.

    Returns:
      One array per result type.
    """
    prepare_once()
    results = jax.ffi.ffi_call(
        CALL_TARGET,
        [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in result_types],
        has_side_effect=has_side_effect,
        input_output_aliases=dict(input_output_aliases or {}),
    )(
        *arrays,
        kernel_hash=serialized.hash,
        module=serialized.bytecode,
        **{**ONE_DEVICE, **(attributes or {})},
    )
    return list(results)


@functools.cache
def prepare_once() -> None:
    """Calls `prepare_environment()` once per process."""
    environment.prepare_environment()
