# SPDX-License-Identifier: Apache-2.0
"""The checks of a complete program that no single family has."""

from pallas_gpu.entry.check import parts, results
from pallas_gpu.entry.check.equations import (
    check_jaxpr,
    features,
    require_element_types,
    require_features,
    require_indexable,
)
from pallas_gpu.entry.check.jax_operations import require_axis_name
from pallas_gpu.entry.check.references import check_inputs, require_transforms, written
from pallas_gpu.entry.check.waits import check_waits

__all__ = [
    "check_inputs", "check_jaxpr", "check_waits", "features", "parts",
    "require_axis_name",
    "require_element_types", "require_features", "require_indexable",
    "require_transforms", "results", "written",
]  # fmt: skip
