# SPDX-License-Identifier: Apache-2.0
"""Pure operations: on arrays in NumPy, on scalars in Python, all others by JAX."""
