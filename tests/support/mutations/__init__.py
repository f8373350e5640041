# SPDX-License-Identifier: Apache-2.0
"""Correct kernels with named mistakes that can be switched on, one at a time."""
