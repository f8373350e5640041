# SPDX-License-Identifier: Apache-2.0
"""Checks of the source: import arrows, sizes, words, the map, public docstrings."""
