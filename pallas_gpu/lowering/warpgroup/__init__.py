# SPDX-License-Identifier: Apache-2.0
"""References of Warpgroup semantics."""
