# SPDX-License-Identifier: Apache-2.0
"""What a kernel costs, as a hint to other compilers."""

from __future__ import annotations

import dataclasses

from pallas_gpu import expect

_COUNT = expect.integer(0)


@expect.arguments(
    flops=_COUNT,
    transcendentals=_COUNT,
    bytes_accessed=_COUNT,
    remote_bytes_transferred=_COUNT,
)
@dataclasses.dataclass(frozen=True)
class CostEstimate:
    """The cost of a kernel: a hint, which this compiler does not use.

    Attributes:
      flops: hint: floating-point operations.
      transcendentals: hint: calls of exp, log and others.
      bytes_accessed: hint: bytes read and written in GMEM.
      remote_bytes_transferred: hint: bytes exchanged with other devices.
    """

    flops: int
    transcendentals: int
    bytes_accessed: int
    remote_bytes_transferred: int = 0
