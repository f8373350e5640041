# SPDX-License-Identifier: Apache-2.0
"""Configurations of ready kernels that fit neither themselves nor the tensor core."""

from __future__ import annotations

import pytest

from pallas_gpu import ops
from tests.support.refusal import refused
from tests.support.refused_calls import call, named

SMALL = {"tile_n": 64, "tile_k": 64, "stages": 2, "strip": 2}
FEW = {"tile_m": 8, "tile_n": 64, "tile_k": 64, "stages": 2, "warpgroups": 1}
SCALED = {"tile_m": 64, "tile_n": 64, "stages": 2, "blocks": 4, "cluster": None}
# Options of each configuration that fit, and what is refused beside them.
REFUSED = {
    ops.MatmulConfig: (
        {**SMALL, "tile_m": 64, "cluster": None, "blocks": 2},
        [
            *({"epilogue_m": 48}, {"epilogue_n": 48}, {"cluster": "k"}),
            *({"minor": "k"}, {"strip": 0}, {"stages": 1}),
            *({"blocks": 1, "cluster": "n"}, {"tile_m": 96}, {"tile_n": 512}),
            {"tile_k": 8},
        ],
    ),
    ops.SplitMatmulConfig: (
        FEW,
        [
            *({"tile_m": 12}, {"tile_m": 264}, {"tile_k": 8}, {"tile_n": 96}),
            *({"tile_n": 192, "warpgroups": 2}, {"split": 3}, {"part_m": 12}),
            *({"stages": 1}, {"clusters": 0}, {"blocks": 3, "split": 4}),
        ],
    ),
    ops.BlackwellMatmulConfig: (
        {**SMALL, "blocks": 2},
        [
            *({"epilogue_n": 48}, {"epilogue_n": 8}, {"minor": "k"}, {"strip": 0}),
            *({"stages": 0}, {"blocks": 0}, {"blocks": 1, "collective": True}),
            *({"tile_n": 272}, {"tile_k": 8}, {"tile_n": 48, "collective": True}),
        ],
    ),
    ops.AttentionConfig: (
        {"block_kv": 64},
        [
            *({"rows": 96}, {"rows": 0}, {"block_kv": 72}, {"block_kv": 272}),
            *({"consumers": 1}, {"stages": 0}, {"heads_together": 0}, {"blocks": 0}),
        ],
    ),
    ops.AttentionBackwardConfig: (
        {},
        [
            *({"block_q": 96}, {"stages": 1}, {"heads_together": 0}),
            *({"blocks": 0}, {"kv_parts": 0}),
        ],
    ),
    ops.BlackwellAttentionConfig: (
        {},
        [{"block_kv": 8}, {"block_kv": 272}, {"stages": 0}, {"heads_together": 0}],
    ),
    ops.DecodeConfig: (
        {},
        [
            *({"block_kv": 96}, {"block_kv": 320}, {"consumers": 2}),
            *({"consumers": 0}, {"cluster": 17}),
        ],
    ),
    ops.RaggedDotConfig: (
        {**SMALL, "tile_m": 64, "tile_k": 32, "epilogue_n": 32},
        [
            *({"tile_m": 96}, {"tile_n": 512}, {"tile_k": 8}, {"epilogue_n": 48}),
            *({"stages": 1}, {"strip": 0}, {"blocks": 0}, {"consumers": 4}),
        ],
    ),
    ops.BlockScaledMatmulConfig: (
        {"tile_n": 128, "stages": 2, "blocks": 2, "strip": 2},
        [
            *({"tile_n": 192}, {"tile_k": 96}, {"minor": "k"}, {"strip": 0}),
            *({"stages": 0}, {"blocks": 0}),
        ],
    ),
    ops.LinearFewConfig: (
        {},
        [
            *({"tokens": 12}, {"tokens": 256}, {"rows": 32}, {"splits": 3}),
            *({"warpgroups": 3}, {"blocks": 0}, {"rows": 256, "warpgroups": 2}),
        ],
    ),
    ops.LinearManyConfig: ({}, [{"tokens": 32}, {"depth": 32}, {"stages": 1}]),
    ops.ScaledMatmulConfig: (
        SCALED,
        [
            *({"tile_m": 96}, {"tile_n": 48}, {"consumers": 4}, {"cluster": "k"}),
            *({"minor": "k"}, {"strip": 0}, {"stages": 1}),
            {"blocks": 1, "cluster": "n"},
        ],
    ),
}
CALLS = {
    named(call(kind, **changes)): call(kind, **{**fitting, **changes})
    for kind, (fitting, every) in REFUSED.items()
    for changes in every
}


@refused
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_configuration_that_does_not_fit(call):
    call()
