# SPDX-License-Identifier: Apache-2.0
"""Products with operands of 8 or 4 bits, and their scales."""
