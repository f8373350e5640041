# SPDX-License-Identifier: Apache-2.0
"""Effects of the arguments of products with narrow operands; see ops_effects.py."""

from __future__ import annotations

LINEAR = "tests/ops/narrow/test_linear.py"
BLOCK_SCALED = "tests/ops/narrow/test_block_scaled.py"
SCALED = "tests/ops/narrow/test_scaled.py"


def _seen(what: str, file: str, tests: dict[str, str]) -> dict[str, str]:
    """Returns where tests of a file see the effects of the parameters of one name."""
    return {f"ops.{what}.{name}": f"{file}::{test}" for name, test in tests.items()}


EFFECTS: dict[str, str] = {
    **dict.fromkeys(
        (
            f"ops.{name}.interpret"
            for name in ("block_scaled_matmul", "scaled_matmul", "linear")
        ),
        "tests/ops/test_schedules.py::test_nine_schedules_give_one_result",
    ),
    **dict.fromkeys(
        (
            "ops.ScaledMatmulConfig.tile_n",
            *(
                f"ops.{name}.compiler_params"
                for name in ("block_scaled_matmul", "scaled_matmul", "linear")
            ),
        ),
        "tests/ops/test_refused_calls.py::test_a_call_that_does_not_fit_is_refused",
    ),
    **_seen(
        "BlockScaledMatmulConfig",
        BLOCK_SCALED,
        {
            "tile_n": "test_tiles_of_256_columns_share_half_of_their_accumulators",
            "tile_k": "test_steps_of_any_depth",
            "stages": "test_steps_of_any_depth",
            "minor": "test_the_order_of_tiles_covers_them_all",
            "strip": "test_the_order_of_tiles_covers_them_all",
            "blocks": "test_several_tiles_in_each_block",
            "collective": "test_pairs_of_blocks_share_tiles",
            "dynamic": "test_blocks_take_the_next_tile_when_they_are_free",
        },
    ),
    **_seen(
        "block_scaled_matmul",
        BLOCK_SCALED,
        {
            "preferred_element_type": "test_types_of_the_result",
            "scale": "test_the_result_is_multiplied_by_a_factor",
            "config": "test_the_order_of_tiles_covers_them_all",
        },
    ),
    **_seen(
        "quantize_blocks",
        BLOCK_SCALED,
        {
            "dtype": "test_rounding_to_blocks",
            "scale_dtype": "test_rounding_to_blocks",
            "block": "test_rounding_to_blocks",
        },
    ),
    **_seen(
        "ScaledMatmulConfig",
        SCALED,
        {
            "tile_m": "test_consumers_of_any_rows",
            "consumers": "test_consumers_of_any_rows",
            "stages": "test_any_number_of_stages",
            "cluster": "test_sizes_that_divide_nothing_in_every_cluster",
            "minor": "test_the_order_of_tiles_covers_them_all",
            "strip": "test_the_order_of_tiles_covers_them_all",
            "blocks": "test_the_order_of_tiles_covers_them_all",
            "zigzag": "test_the_order_of_k_shows_in_the_position_of_a_tile_alone",
        },
    ),
    **_seen(
        "scaled_matmul",
        SCALED,
        {
            "a_scale": "test_types_and_scales",
            "b_scale": "test_types_and_scales",
            "transpose_b": "test_b_of_both_layouts",
            "bias": "test_sizes_of_zero",
            "out_dtype": "test_types_of_the_result",
            "promote": "test_promoted_sums_are_more_precise",
            "config": "test_the_order_of_tiles_covers_them_all",
        },
    ),
    **_seen(
        "LinearFewConfig",
        LINEAR,
        {
            "rows": "test_splits_of_k",
            "tokens": "test_tiles_of_tokens_and_stages",
            "stages": "test_tiles_of_tokens_and_stages",
            "splits": "test_splits_of_k",
            "warpgroups": "test_splits_of_k",
            "resident": "test_turns_and_parts_of_resident_tokens",
            "blocks": "test_turns_and_parts_of_resident_tokens",
        },
    ),
    **_seen(
        "LinearManyConfig",
        LINEAR,
        dict.fromkeys(
            ("tokens", "depth", "stages", "paired", "strip", "blocks"),
            "test_schedules_for_many_tokens",
        ),
    ),
    **_seen(
        "linear",
        LINEAR,
        {
            "w_scale": "test_scales_of_groups",
            "bias": "test_bias_and_activation",
            "activation": "test_bias_and_activation",
            "transpose_w": "test_rows_that_tma_cannot_address",
            "out_dtype": "test_types_of_the_result",
            "config": "test_types",
        },
    ),
    **_seen(
        "quantize",
        LINEAR,
        {
            "dtype": "test_rounded_integers_are_near",
            "axis": "test_rounded_integers_are_near",
            "group": "test_rounded_integers_are_near",
        },
    ),
}
