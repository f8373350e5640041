# SPDX-License-Identifier: Apache-2.0
"""Doors to others: kernels written for JAX's own `pallas_call`, which this package runs.

Importing it registers the lowerings.
"""

from __future__ import annotations

from pallas_gpu.bridge import receive

__all__ = ["receive"]
