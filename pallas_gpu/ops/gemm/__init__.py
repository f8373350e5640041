# SPDX-License-Identifier: Apache-2.0
"""Matrix products: any shape and type, fused epilogues, quantized weights."""
