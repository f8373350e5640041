# SPDX-License-Identifier: Apache-2.0
"""Operations that machines have in common, and what rules of theirs consist of."""
