# SPDX-License-Identifier: Apache-2.0
"""The check pass over a complete program; one file per family, all of them imported."""

from __future__ import annotations

import importlib
import pkgutil

from pallas_gpu.entry.check import parts, results
from pallas_gpu.entry.check.equations import (
    check_jaxpr,
    features,
    require_element_types,
    require_features,
    require_indexable,
)
from pallas_gpu.entry.check.grids.griddepcontrol import check_dependencies
from pallas_gpu.entry.check.mbarrier import check_waits
from pallas_gpu.entry.check.positions import require_axis_name
from pallas_gpu.entry.check.references import check_inputs, written
from pallas_gpu.entry.check.tma import check_copy
from pallas_gpu.entry.check.wgmma import require_transforms
from pallas_gpu.primitives._engines import Side, check_threads

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

__all__ = [
    "Side", "check_copy", "check_dependencies", "check_inputs", "check_jaxpr",
    "check_threads", "check_waits", "features", "parts", "require_axis_name",
    "require_element_types", "require_features", "require_indexable",
    "require_transforms", "results", "written",
]  # fmt: skip
