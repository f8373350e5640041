# SPDX-License-Identifier: Apache-2.0
"""Drawings of layouts, as text and as SVG: who holds which element of an array."""
