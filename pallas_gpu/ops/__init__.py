# SPDX-License-Identifier: Apache-2.0
"""Ready kernels, written on the public names alone."""

from pallas_gpu.ops import collectives as collectives
from pallas_gpu.ops.flash.attention import attention
from pallas_gpu.ops.flash.backward.config import AttentionBackwardConfig
from pallas_gpu.ops.flash.config import (
    AttentionConfig,
    BlackwellAttentionConfig,
    DecodeConfig,
)
from pallas_gpu.ops.flash.decode import decode_attention
from pallas_gpu.ops.flash.standard import dot_product_attention
from pallas_gpu.ops.gemm.config import (
    BlackwellMatmulConfig,
    BlockScaledMatmulConfig,
    LinearFewConfig,
    LinearManyConfig,
    MatmulConfig,
    RaggedDotConfig,
    ScaledMatmulConfig,
    SplitMatmulConfig,
)
from pallas_gpu.ops.gemm.matmul import matmul
from pallas_gpu.ops.moe.ragged_dot import ragged_dot, ragged_dot_general
from pallas_gpu.ops.narrow.block_scaled import block_scaled_matmul
from pallas_gpu.ops.narrow.linear import linear
from pallas_gpu.ops.narrow.quantize import quantize, quantize_blocks
from pallas_gpu.ops.narrow.scaled import scaled_matmul
from pallas_gpu.ops.rows.cross_entropy import linear_cross_entropy
from pallas_gpu.ops.rows.norms import layer_norm, rms_norm
from pallas_gpu.ops.rows.rotary import rotary_embedding
from pallas_gpu.ops.rows.row_kernel import Reduction, row_kernel
from pallas_gpu.ops.rows.softmax import log_softmax, softmax
from pallas_gpu.ops.rows.top_k import top_k
from pallas_gpu.ops.rules import clear_cache

__all__ = [
    "AttentionBackwardConfig",
    "AttentionConfig",
    "BlackwellAttentionConfig",
    "BlackwellMatmulConfig",
    "BlockScaledMatmulConfig",
    "DecodeConfig",
    "LinearFewConfig",
    "LinearManyConfig",
    "MatmulConfig",
    "RaggedDotConfig",
    "Reduction",
    "ScaledMatmulConfig",
    "SplitMatmulConfig",
    "attention",
    "block_scaled_matmul",
    "clear_cache",
    "collectives",
    "decode_attention",
    "dot_product_attention",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "log_softmax",
    "matmul",
    "quantize",
    "quantize_blocks",
    "ragged_dot",
    "ragged_dot_general",
    "rms_norm",
    "rotary_embedding",
    "row_kernel",
    "scaled_matmul",
    "softmax",
    "top_k",
]


def __dir__() -> list[str]:
    return sorted(__all__)
