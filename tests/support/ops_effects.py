# SPDX-License-Identifier: Apache-2.0
"""Effects of the arguments of ready kernels, for tests/public/test_effects.py.

A family's tests name each parameter of its functions and configurations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.support import public_names as names
from tools.source_tree import ROOT

# Each configuration under many schedules, compiled, and what is refused.
_EVERY = (
    *("test_schedules.py", "test_compiled.py", "test_refused_calls.py"),
    "test_refused_configurations.py",
)
_ATTENTION = (
    *("flash/test_attention.py", "flash/test_attention_options.py"),
    *("flash/test_attention_narrow.py", "flash/test_attention_backward.py"),
)
_ROWS, _LINEAR = ("rows/test_rows.py",), ("narrow/test_linear.py",)
_SCALED, _BLOCKS = ("narrow/test_scaled.py",), ("narrow/test_block_scaled.py",)
_DECODE, _FEW = ("flash/test_decode.py",), ("gemm/test_few.py",)
_RAGGED = "moe/test_ragged_dot.py", "moe/test_gather.py", "moe/test_narrow.py"
_COLLECTIVES = (
    *("collectives/test_calls.py", "collectives/test_products.py"),
    *("collectives/test_experts.py", "collectives/test_ring_attention.py"),
)
_MATMUL = (
    *("gemm/test_matmul.py", "gemm/test_matmul_any.py"),
    *("gemm/test_matmul_epilogue.py", "gemm/test_matmul_blackwell.py"),
)
# By function or class: the files of tests/ops that see its parameters' effects.
FILES = {
    "collectives": _COLLECTIVES,
    "matmul": _MATMUL,
    "MatmulConfig": _MATMUL,
    "BlackwellMatmulConfig": _MATMUL,
    "SplitMatmulConfig": _FEW,
    "attention": _ATTENTION,
    "AttentionConfig": _ATTENTION,
    "AttentionBackwardConfig": _ATTENTION,
    "BlackwellAttentionConfig": _ATTENTION,
    "dot_product_attention": ("flash/test_standard.py",),
    "decode_attention": _DECODE,
    "DecodeConfig": _DECODE,
    "ragged_dot": _RAGGED,
    "ragged_dot_general": _RAGGED,
    "RaggedDotConfig": _RAGGED,
    "linear": _LINEAR,
    "LinearFewConfig": _LINEAR,
    "LinearManyConfig": _LINEAR,
    "quantize": _LINEAR,
    "scaled_matmul": _SCALED,
    "ScaledMatmulConfig": _SCALED,
    "block_scaled_matmul": _BLOCKS,
    "BlockScaledMatmulConfig": _BLOCKS,
    "quantize_blocks": _BLOCKS,
    "linear_cross_entropy": ("rows/test_cross_entropy.py",),
    **dict.fromkeys(
        (
            *("softmax", "log_softmax", "rms_norm", "layer_norm"),
            *("rotary_embedding", "top_k", "row_kernel", "Reduction"),
        ),
        _ROWS,
    ),
}
# Hints, and what is refused, are in the test's own tables.
_OTHERS = {"precision", "implementation"}


def _effects() -> Iterator[tuple[str, str]]:
    for name, function in names.public_callables().items():
        owner = name.split(".")[1:2]
        if not name.startswith("ops.") or owner == ["clear_cache"]:
            continue
        files = [f"tests/ops/{file}" for file in (*FILES[owner[0]], *_EVERY)]
        for parameter in names.parameters(function).values():
            if parameter.default is parameter.empty or parameter.name in _OTHERS:
                continue
            word = re.compile(rf"\b{parameter.name}\b")
            seen = (file for file in files if word.search((ROOT / file).read_text()))
            yield f"{name}.{parameter.name}", next(seen, files[0])


EFFECTS: dict[str, str] = dict(_effects())
