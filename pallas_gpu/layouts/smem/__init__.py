# SPDX-License-Identifier: Apache-2.0
"""Shared memory: tiling and swizzle, bank conflicts, accesses, wgmma's descriptors."""
