# SPDX-License-Identifier: Apache-2.0
"""Positions on a grid, and launches: a file per family, with all its rules."""
