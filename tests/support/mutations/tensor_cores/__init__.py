# SPDX-License-Identifier: Apache-2.0
"""Kernels of the tensor cores that have mutants."""
