# SPDX-License-Identifier: Apache-2.0
"""First light: the three kernels that `make demo` shows and the tests hold."""
