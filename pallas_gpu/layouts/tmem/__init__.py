# SPDX-License-Identifier: Apache-2.0
"""Tensor memory: placement of arrays, and transfers from and to registers."""
