# SPDX-License-Identifier: Apache-2.0
"""Tests of what receives kernels of JAX's own Pallas."""
