# SPDX-License-Identifier: Apache-2.0
"""Grids: the positions that CTAs work on, and launches that follow each other."""
