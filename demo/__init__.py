# SPDX-License-Identifier: Apache-2.0
"""The four kernels of `make demo`, which the tests check too."""
