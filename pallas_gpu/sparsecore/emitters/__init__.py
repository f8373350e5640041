# SPDX-License-Identifier: Apache-2.0
"""How a SparseCore does it: MLIR of the dialects that libtpu takes, a file a family.

Has never heard of a jaxpr.
"""
