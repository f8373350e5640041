# SPDX-License-Identifier: Apache-2.0
"""References under Warpgroup semantics."""
