# SPDX-License-Identifier: Apache-2.0
"""Operations that move elements between the lanes of warps, and between warps."""
