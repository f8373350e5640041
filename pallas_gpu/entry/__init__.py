# SPDX-License-Identifier: Apache-2.0
"""How a kernel is called: kernel(), pallas_call(), run_scoped(), when, loop."""
