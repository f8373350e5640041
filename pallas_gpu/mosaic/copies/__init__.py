# SPDX-License-Identifier: Apache-2.0
"""Copies between GMEM and SMEM that are not boxes of a tensor map."""
