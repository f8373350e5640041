# SPDX-License-Identifier: Apache-2.0
"""Families of copies between GMEM and SMEM that are not boxes of a tensor map."""
