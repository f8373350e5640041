# SPDX-License-Identifier: Apache-2.0
"""The passes of the compilation pipeline, over a kernel that a test built by hand."""

from __future__ import annotations

from jaxlib.mlir import ir

from pallas_gpu.mosaic.module import KernelBuilder
from pallas_gpu.mosaic.program import passes


def finished(builder: KernelBuilder) -> ir.Module:
    """Returns the module of a builder whose `with` block has ended."""
    passes.lower_host_work(builder.module)
    passes.share_subexpressions(builder.module)
    return builder.finish()
