# SPDX-License-Identifier: Apache-2.0
"""First light: the two kernels that `make demo` shows and the tests hold."""
