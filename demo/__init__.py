# SPDX-License-Identifier: Apache-2.0
"""The three kernels of `make demo`, which the tests check too."""
