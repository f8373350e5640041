# SPDX-License-Identifier: Apache-2.0
"""Lowers a jaxpr to Mosaic GPU MLIR; importing it registers the rules."""

from pallas_gpu.lowering import families, launch

__all__ = ["families", "launch"]
