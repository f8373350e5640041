# SPDX-License-Identifier: Apache-2.0
"""Emitters: the MLIR of one kernel, written through handles of MLIR values."""
