# SPDX-License-Identifier: Apache-2.0
"""References to memory as MLIR values: shapes, views and slices."""
