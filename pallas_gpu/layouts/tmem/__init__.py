# SPDX-License-Identifier: Apache-2.0
"""Tensor memory: where arrays lie in it, and how registers meet them."""
