# SPDX-License-Identifier: Apache-2.0
"""Global memory: how TMA and how threads reach a slice of an array."""
