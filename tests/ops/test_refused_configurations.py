# SPDX-License-Identifier: Apache-2.0
"""Configurations of ready kernels that fit neither themselves nor the tensor core."""

from __future__ import annotations

import pytest

from pallas_gpu import errors, ops

TILE = "the tensor core does not support this tile"
PARTS = "the epilogue's parts do not divide the tile"
ORDER, POSITIVE = "invalid order of tiles", "a number is not positive"
NONE = "there are no stages or no blocks"
# What is said of a configuration, and changes of `BASES` of which it is said.
REFUSED = {
    ops.MatmulConfig: {
        PARTS: [{"epilogue_m": 48}, {"epilogue_n": 48}],
        "invalid cluster": [{"cluster": "k"}],
        ORDER: [{"minor": "k"}, {"strip": 0}],
        "there are too few stages": [{"stages": 1}],
        "there are fewer blocks than in a cluster": [{"blocks": 1, "cluster": "n"}],
        TILE: [{"tile_m": 96}, {"tile_n": 512}, {"tile_k": 8}],
    },
    ops.SplitMatmulConfig: {
        TILE: [{"tile_m": 12}, {"tile_m": 264}, {"tile_k": 8}],
        "the warpgroups do not divide the columns": [
            {"tile_n": 96},
            {"tile_n": 192, "warpgroups": 2},
        ],
        "invalid division of K": [{"split": 3}],
        "the parts do not divide the rows of a tile": [{"part_m": 12}],
        "there are too few stages, clusters or blocks": [
            {"stages": 1},
            {"clusters": 0},
            {"blocks": 3, "split": 4},
        ],
    },
    ops.BlackwellMatmulConfig: {
        PARTS: [{"epilogue_n": 48}, {"epilogue_n": 8}],
        ORDER: [{"minor": "k"}, {"strip": 0}],
        NONE: [{"stages": 0}, {"blocks": 0}, {"blocks": 1, "collective": True}],
        TILE: [{"tile_n": 272}, {"tile_k": 8}, {"tile_n": 48, "collective": True}],
    },
    ops.AttentionConfig: {
        TILE: [{"rows": 96}, {"rows": 0}, {"block_kv": 72}, {"block_kv": 272}],
        "invalid number of consumers": [{"consumers": 1}],
        POSITIVE: [{"stages": 0}, {"heads_together": 0}],
        "invalid number of blocks": [{"blocks": 0}],
    },
    ops.AttentionBackwardConfig: {
        "": [
            *({"block_q": 96}, {"stages": 1}, {"heads_together": 0}),
            *({"blocks": 0}, {"kv_parts": 0}),
        ],
    },
    ops.BlackwellAttentionConfig: {
        TILE: [{"block_kv": 8}, {"block_kv": 272}],
        POSITIVE: [{"stages": 0}, {"heads_together": 0}],
    },
    ops.DecodeConfig: {
        "the tensor core does not support this block": [
            {"block_kv": 96},
            {"block_kv": 320},
        ],
        "the warpgroups cannot divide a block": [{"consumers": 2}, {"consumers": 0}],
        "invalid size of a cluster": [{"cluster": 17}],
    },
    ops.RaggedDotConfig: {
        TILE: [{"tile_m": 96}, {"tile_n": 512}, {"tile_k": 8}],
        PARTS: [{"epilogue_n": 48}],
        "there are too few stages": [{"stages": 1}],
        "there is no strip or no block": [{"strip": 0}, {"blocks": 0}],
    },
    ops.BlockScaledMatmulConfig: {
        "this tile is not supported": [{"tile_n": 192}, {"tile_k": 96}],
        ORDER: [{"minor": "k"}, {"strip": 0}],
        NONE: [{"stages": 0}, {"blocks": 0}],
    },
    ops.LinearFewConfig: {
        "": [
            *({"tokens": 12}, {"tokens": 256}, {"rows": 32}, {"splits": 3}),
            *({"warpgroups": 3}, {"blocks": 0}, {"rows": 256, "warpgroups": 2}),
        ],
    },
    ops.LinearManyConfig: {"": [{"tokens": 32}, {"depth": 32}, {"stages": 1}]},
    ops.ScaledMatmulConfig: {
        "these tiles are not supported": [
            {"tile_m": 96},
            {"tile_n": 48},
            {"consumers": 4},
        ],
        "invalid cluster or order of tiles": [
            {"cluster": "k"},
            {"minor": "k"},
            {"strip": 0},
        ],
        "there are too few stages or blocks": [
            {"stages": 1},
            {"blocks": 1, "cluster": "n"},
        ],
    },
}
SMALL = {"tile_n": 64, "tile_k": 64, "stages": 2, "strip": 2}
BASES = {
    ops.MatmulConfig: {**SMALL, "tile_m": 64, "cluster": None, "blocks": 2},
    ops.SplitMatmulConfig: {
        **{"tile_m": 8, "tile_n": 64, "tile_k": 64, "stages": 2, "warpgroups": 1}
    },
    ops.BlackwellMatmulConfig: {**SMALL, "blocks": 2},
    ops.AttentionConfig: {"block_kv": 64},
    ops.RaggedDotConfig: {**SMALL, "tile_m": 64, "tile_k": 32, "epilogue_n": 32},
    ops.ScaledMatmulConfig: {
        **{"tile_m": 64, "tile_n": 64, "stages": 2, "blocks": 4, "cluster": None}
    },
    ops.BlockScaledMatmulConfig: {"tile_n": 128, "stages": 2, "blocks": 2, "strip": 2},
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_configuration_fits_the_tensor_core_and_itself(kind):
    for what, each in REFUSED[kind].items():
        for changes in each:
            with pytest.raises(errors.ArgumentError) as caught:
                kind(**{**BASES.get(kind, {}), **changes})
            error = caught.value
            assert type(error) is errors.ArgumentError
            assert error.what.startswith(f"{kind.__name__}: {what}"), changes
            assert str(next(iter(changes.values()))) in str(error.got), changes
            assert error.expected and error.hint, changes
