# SPDX-License-Identifier: Apache-2.0
"""Kernels written for JAX's own Pallas, but for their compiler_params."""
