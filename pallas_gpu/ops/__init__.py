# SPDX-License-Identifier: Apache-2.0
"""Ready kernels, written on the public names alone."""

from pallas_gpu.ops.attention import AttentionConfig, attention
from pallas_gpu.ops.matmul import MatmulConfig, clear_cache, matmul

__all__ = ["AttentionConfig", "MatmulConfig", "attention", "clear_cache", "matmul"]
