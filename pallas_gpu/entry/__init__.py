# SPDX-License-Identifier: Apache-2.0
"""Entry points of kernels: kernel(), run_scoped(), when, loop."""
