# SPDX-License-Identifier: Apache-2.0
"""Elementwise operations and references of Warpgroup semantics."""
