# SPDX-License-Identifier: Apache-2.0
"""Effects of the arguments of ready kernels, for tests/public/test_effects.py."""

from __future__ import annotations

from tests.support import narrow_effects

MATMUL, ATTENTION = "tests/ops/gemm/test_matmul.py", "tests/ops/flash/test_attention.py"
ANY_MATMUL = "tests/ops/gemm/test_matmul_any.py"
EPILOGUES = "tests/ops/gemm/test_matmul_epilogue.py"
DECODE = "tests/ops/flash/test_decode.py"
BLACKWELL_MATMUL = "tests/ops/gemm/test_matmul_blackwell.py"
RAGGED_DOT = "tests/ops/moe/test_ragged_dot.py"
NARROW = "tests/ops/moe/test_narrow.py"
GATHER = "tests/ops/moe/test_gather.py"
STANDARD = "tests/ops/flash/test_standard.py"
ATTENTION_OPTIONS = "tests/ops/flash/test_attention_options.py"
ATTENTION_BACKWARD = "tests/ops/flash/test_attention_backward.py"
NARROW_ATTENTION = "tests/ops/flash/test_attention_narrow.py"
BLACKWELL_ATTENTION = "tests/ops/flash/test_attention_blackwell.py"
ROWS = "tests/ops/rows/test_rows.py"
# Each configuration under many schedules, and compiled.
SCHEDULES = "tests/ops/test_schedules.py::test_nine_schedules_give_one_result"
DERIVATIVES = (
    "tests/ops/test_schedules.py::"
    "test_six_schedules_give_one_result_and_the_same_derivatives"
)
CALLS = "tests/ops/test_refused_calls.py::test_a_call_that_does_not_fit_is_refused"
SMEM = "tests/ops/test_refused_calls.py::test_the_buffers_fit_shared_memory"
CONFIGURATIONS = (
    "tests/ops/test_refused_configurations.py::"
    "test_a_configuration_fits_the_tensor_core_and_itself"
)
COMPILED = "tests/ops/test_compiled.py::test_nothing_spills"


def _seen(what: str, file: str, tests: dict[str, str]) -> dict[str, str]:
    """Returns where tests of a file see the effects of the parameters of one name."""
    return {f"ops.{what}.{name}": f"{file}::{test}" for name, test in tests.items()}


_RAGGED = {
    "preferred_element_type": "test_types_of_operands_and_result",
    "group_offset": "test_some_groups_have_their_matrices_elsewhere",
    "config": "test_any_configuration",
}

EFFECTS: dict[str, str] = {
    **narrow_effects.EFFECTS,
    **_seen(
        "MatmulConfig",
        MATMUL,
        {
            "tile_m": "test_tiles_and_clusters_need_not_divide_the_problem",
            "tile_n": "test_tiles_of_narrow_swizzles",
            "tile_k": "test_tiles_of_narrow_swizzles",
            "epilogue_m": "test_an_epilogue_in_parts",
            "epilogue_n": "test_an_epilogue_in_parts",
            "cluster": "test_tiles_and_clusters_need_not_divide_the_problem",
            "minor": "test_the_order_of_tiles_covers_them_all",
            "strip": "test_the_order_of_tiles_covers_them_all",
            "blocks": "test_a_number_of_tiles_that_the_blocks_do_not_divide",
        },
    ),
    **dict.fromkeys(
        (
            f"ops.SplitMatmulConfig.{name}"
            for name in (
                *("tile_m", "tile_n", "tile_k", "stages", "warpgroups", "clusters"),
                *("part_m", "blocks"),
            )
        ),
        CONFIGURATIONS,
    ),
    **dict.fromkeys(
        (
            *("ops.MatmulConfig.transposed", "ops.MatmulConfig.parts"),
            *("ops.SplitMatmulConfig.split", "ops.AttentionConfig.block_kv"),
            *("ops.ragged_dot.compiler_params", "ops.decode_attention.compiler_params"),
            "ops.ragged_dot_general.compiler_params",
        ),
        CALLS,
    ),
    **dict.fromkeys(("ops.MatmulConfig.stages", "ops.AttentionConfig.stages"), SMEM),
    **_seen(
        "BlackwellMatmulConfig",
        MATMUL,
        {
            "tile_n": "test_tiles_of_narrow_swizzles",
            "tile_k": "test_tiles_of_narrow_swizzles",
            "stages": "test_any_number_of_stages",
            "epilogue_n": "test_an_epilogue_in_parts",
            "minor": "test_the_order_of_tiles_covers_them_all",
            "strip": "test_the_order_of_tiles_covers_them_all",
            "blocks": "test_a_number_of_tiles_that_the_blocks_do_not_divide",
        },
    ),
    **_seen(
        "BlackwellMatmulConfig",
        BLACKWELL_MATMUL,
        {
            "collective": "test_pairs_of_blocks_share_tiles",
            "dynamic": "test_blocks_take_the_next_tile_when_they_are_free",
        },
    ),
    **_seen(
        "AttentionConfig",
        ATTENTION,
        {
            "rows": "test_consumers_with_turns_and_without",
            "consumers": "test_consumers_with_turns_and_without",
            "ping_pong": "test_consumers_with_turns_and_without",
            "keep_maxima": "test_maxima_that_grow_from_step_to_step",
            "heads_together": "test_the_order_of_tiles_covers_them_all",
            "blocks": "test_persistent_blocks_compute_several_tiles",
            "default.causal": "test_the_default_configurations",
            "default.kv_len": "test_whose_consumers_alternate",
        },
    ),
    **_seen(
        "AttentionBackwardConfig",
        ATTENTION_BACKWARD,
        {
            "block_q": "test_configurations",
            "stages": "test_configurations",
            "heads_together": "test_configurations",
            "blocks": "test_persistent_blocks",
            "kv_parts": "test_parts_of_the_heads_that_share_a_head_of_kv",
            "default.deterministic": "test_the_default_configuration",
        },
    ),
    **_seen(
        "attention",
        NARROW_ATTENTION,
        {
            "q_scale": "test_scales_of_all_of_heads_and_of_batches",
            "k_scale": "test_scales_of_all_of_heads_and_of_batches",
            "v_scale": "test_scales_of_all_of_heads_and_of_batches",
            "out_dtype": "test_the_type_of_the_result",
        },
    ),
    **_seen(
        "attention",
        ATTENTION_BACKWARD,
        {"backward_config": "test_configurations"},
    ),
    "ops.attention.deterministic": DERIVATIVES,
    "ops.AttentionBackwardConfig.deterministic": DERIVATIVES,
    **_seen(
        "BlackwellAttentionConfig",
        ATTENTION,
        {
            "block_kv": "test_masks_meet_blocks_of_any_size",
            "stages": "test_any_number_of_stages",
            "heads_together": "test_the_order_of_tiles_covers_them_all",
        },
    ),
    **_seen(
        "attention",
        ATTENTION,
        {
            "causal": "test_types_and_masks",
            "sm_scale": "test_the_scale_of_the_scores",
            "config": "test_any_number_of_stages",
        },
    ),
    **_seen(
        "attention",
        ATTENTION_OPTIONS,
        {
            "bias": "test_a_bias_that_broadcasts",
            "window": "test_windows",
            "align": "test_windows",
            "soft_cap": "test_a_soft_cap",
            "alibi_slopes": "test_alibi",
            "q_segment_ids": "test_segments",
            "kv_segment_ids": "test_segments",
            "q_lengths": "test_lengths_of_each_sequence",
            "kv_lengths": "test_lengths_of_each_sequence",
            "cu_seqlens_q": "test_packed_sequences",
            "cu_seqlens_kv": "test_packed_sequences",
            "return_logsumexp": "test_logsumexp",
        },
    ),
    **_seen(
        "DecodeConfig",
        DECODE,
        {
            "block_kv": "test_blocks_and_stages",
            "stages": "test_blocks_and_stages",
            "consumers": "test_two_warpgroups_share_a_block",
            "cluster": "test_results_of_a_grid_and_of_a_cluster",
            "workers": "test_any_number_of_ctas_divides_the_blocks",
        },
    ),
    **_seen(
        "decode_attention",
        DECODE,
        {
            "lengths": "test_lengths_differ",
            "page_table": "test_pages_in_any_order",
            "k_scale": "test_scales_of_heads",
            "v_scale": "test_scales_of_heads",
            "kv_layout": "test_heads_before_tokens",
            "v": "test_keys_and_values_in_one_array",
            "kv_axis": "test_keys_and_values_in_one_array",
            "causal": "test_a_query_may_see_later_ones",
            "sm_scale": "test_scores_are_capped_and_scaled",
            "window": "test_a_window",
            "soft_cap": "test_scores_are_capped_and_scaled",
            "return_logsumexp": "test_lengths_differ",
            "config": "test_any_number_of_ctas_divides_the_blocks",
        },
    ),
    "ops.decode_attention.interpret": SCHEDULES,
    "ops.attention.compiler_params": f"{BLACKWELL_ATTENTION}::"
    "test_target_and_configuration_choose_the_kernel",
    "ops.attention.interpret": ATTENTION,
    **_seen(
        "dot_product_attention",
        STANDARD,
        {
            **dict.fromkeys(
                (
                    *("bias", "mask", "is_causal", "local_window_size"),
                    *("query_seq_lengths", "key_value_seq_lengths"),
                ),
                "test_arguments_alone_in_pairs_and_together",
            ),
            **dict.fromkeys(
                ("scale", "return_residual"), "test_without_a_batch_dimension"
            ),
            "config": "test_shapes_of_a_bias",
            "compiler_params": "test_blackwell_is_a_target",
            "interpret": "test_blackwell_is_a_target",
        },
    ),
    **_seen(
        "RaggedDotConfig",
        RAGGED_DOT,
        dict.fromkeys(
            (
                *("tile_m", "tile_n", "tile_k", "stages"),
                *("epilogue_n", "strip"),
            ),
            "test_any_configuration",
        ),
    ),
    "ops.RaggedDotConfig.blocks": f"{RAGGED_DOT}::test_any_number_of_blocks",
    "ops.RaggedDotConfig.default.narrow": COMPILED,
    **_seen(
        "ragged_dot_general",
        NARROW,
        dict.fromkeys(("lhs_scale", "rhs_scale"), "test_products_of_narrow_floats"),
    ),
    "ops.RaggedDotConfig.default.contracted": f"{RAGGED_DOT}::"
    "test_the_default_configurations",
    "ops.RaggedDotConfig.default.gated": COMPILED,
    "ops.ragged_dot.interpret": SCHEDULES,
    "ops.ragged_dot_general.interpret": SCHEDULES,
    **_seen("ragged_dot", RAGGED_DOT, _RAGGED),
    **_seen(
        "ragged_dot",
        GATHER,
        {
            "rows": "test_rows_of_tokens",
            "activation": "test_an_activation",
            "gate": "test_a_gate",
        },
    ),
    "ops.ragged_dot_general.rows": f"{GATHER}::test_products_over_rows_of_tokens",
    **_seen("ragged_dot_general", RAGGED_DOT, _RAGGED),
    **_seen(
        "matmul",
        ANY_MATMUL,
        {
            "transpose_a": "test_operands_may_be_transposed",
            "transpose_b": "test_operands_may_be_transposed",
        },
    ),
    **_seen(
        "matmul",
        EPILOGUES,
        {
            "bias": "test_an_epilogue_is_applied_to_the_sums",
            "residual": "test_an_epilogue_is_applied_to_the_sums",
            "activation": "test_an_epilogue_is_applied_to_the_sums",
            "gate": "test_an_epilogue_is_applied_to_the_sums",
            "scale": "test_an_epilogue_is_applied_to_the_sums",
        },
    ),
    "ops.matmul.config": f"{MATMUL}::test_any_number_of_stages",
    "ops.matmul.out_dtype": f"{MATMUL}::test_types_of_operands_and_result",
    "ops.matmul.compiler_params": f"{BLACKWELL_MATMUL}::"
    "test_the_target_chooses_the_kernel",
    "ops.matmul.interpret": MATMUL,
    **{
        f"ops.{name}.{which}": ROWS
        for name in (
            *("softmax", "log_softmax", "rms_norm", "layer_norm"),
            *("rotary_embedding", "top_k"),
        )
        for which in ("compiler_params", "interpret")
    },
    **_seen(
        "linear_cross_entropy",
        "tests/ops/rows/test_cross_entropy.py",
        {
            "transpose_w": "test_losses",
            "return_logsumexp": "test_losses",
            "compiler_params": "test_approximate_exponentials_are_the_default",
        },
    ),
    "ops.linear_cross_entropy.interpret": DERIVATIVES,
    "ops.rms_norm.scale": f"{ROWS}::test_norms_without_scale_or_bias",
    "ops.rms_norm.epsilon": f"{ROWS}::test_the_epsilon_of_norms",
    "ops.layer_norm.scale": f"{ROWS}::test_norms_without_scale_or_bias",
    "ops.layer_norm.bias": f"{ROWS}::test_norms_without_scale_or_bias",
    "ops.layer_norm.epsilon": f"{ROWS}::test_the_epsilon_of_norms",
    "ops.rotary_embedding.interleaved": f"{ROWS}::test_rotary_embedding",
    **_seen(
        "rotary_embedding",
        ROWS,
        {
            "positions": "test_rotary_embedding_at_given_positions",
            "base": "test_rotary_embedding_at_given_positions",
        },
    ),
}
