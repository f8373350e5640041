# SPDX-License-Identifier: Apache-2.0
"""Kernels written for others: JAX's own `pallas_call` with our parameters.

Importing it registers the lowerings.
"""

from __future__ import annotations

from pallas_gpu.bridge import receive

__all__ = ["receive"]
