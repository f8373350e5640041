# SPDX-License-Identifier: Apache-2.0
"""How the hardware does it: emission of MLIR for one kernel, handle by handle."""
