# SPDX-License-Identifier: Apache-2.0
"""Global memory: accesses to a slice of an array, by TMA and by threads."""
