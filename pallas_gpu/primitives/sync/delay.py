# SPDX-License-Identifier: Apache-2.0
"""Delays."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_gpu import errors, expect
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.types import values

__all__ = ["delay"]

delay_p = registry.define("delay", "delay")

# PTX ISA, nanosleep: the longest suspension.
_MAX_NANOSECONDS = 1_000_000


@expect.arguments()
def delay(nanos: values.Index) -> None:
    """Suspends the issuer's threads for about as long as asked.

    PTX: nanosleep.u32. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp; each thread sleeps, from no
    time to twice the given one, and orders no accesses.

    Args:
      nanos: int32 scalar, nanoseconds, 0 to 1,000,000.

    Raises:
      ArgumentTypeError: not an integer scalar.
      ArgumentError: a Python integer out of range.
    """
    if isinstance(nanos, int) and not 0 <= nanos <= _MAX_NANOSECONDS:
        raise errors.ArgumentError(
            "delay: nanos is out of range",
            expected=f"0 to {_MAX_NANOSECONDS} nanoseconds, the hardware's longest",
            got=nanos,
            hint="call it several times, in a plgpu.loop",
        )
    ops.bind(delay_p, {"nanos": jnp.asarray(nanos, jnp.int32)})
