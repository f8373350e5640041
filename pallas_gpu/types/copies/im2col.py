# SPDX-License-Identifier: Apache-2.0
"""The windows of images, as a step on a reference."""

from __future__ import annotations

import dataclasses

import jax

from pallas_gpu.layouts.gmem.im2col import Windows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Im2ColStep:
    """Makes (N, *sizes, C) images all of their windows.

    Attributes:
      windows: which.
    """

    windows: Windows = dataclasses.field(metadata={"static": True})
