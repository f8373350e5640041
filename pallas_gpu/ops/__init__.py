# SPDX-License-Identifier: Apache-2.0
"""Ready kernels, written on the public names alone."""

from pallas_gpu.ops import attention_blackwell as _attention_blackwell
from pallas_gpu.ops import attention_kernel as _attention_kernel
from pallas_gpu.ops import matmul as _matmul
from pallas_gpu.ops.attention import attention
from pallas_gpu.ops.attention_config import AttentionConfig, BlackwellAttentionConfig
from pallas_gpu.ops.matmul import BlackwellMatmulConfig, MatmulConfig, matmul

__all__ = [
    "AttentionConfig",
    "BlackwellAttentionConfig",
    "BlackwellMatmulConfig",
    "MatmulConfig",
    "attention",
    "clear_cache",
    "matmul",
]


def clear_cache() -> None:
    """Forgets traced kernels; for measurements of tracing."""
    _matmul.clear_cache()
    _attention_kernel.make_kernel.cache_clear()
    _attention_blackwell.make_kernel.cache_clear()


def __dir__() -> list[str]:
    return sorted(__all__)
