# SPDX-License-Identifier: Apache-2.0
"""Entry points of kernels: kernel(), pallas_call(), run_scoped(), when, loop."""
