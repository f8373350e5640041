# SPDX-License-Identifier: Apache-2.0
"""Kernels written for JAX's own Pallas; only their compiler_params are this package's."""
