# SPDX-License-Identifier: Apache-2.0
"""Operations on rows: softmax, norms, rotary embedding, top-k, fused cross-entropy."""
