# SPDX-License-Identifier: Apache-2.0
"""JAX's pure operations on arrays and scalars."""
