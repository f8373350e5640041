# SPDX-License-Identifier: Apache-2.0
"""Errors that JAX raises while a body is traced, converted to ours."""

from pallas_gpu.entry.jax_errors.conversion import escaped_value, typed

__all__ = ["escaped_value", "typed"]
