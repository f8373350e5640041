# SPDX-License-Identifier: Apache-2.0
"""Operations: one file per family, with public functions, checks and types."""
