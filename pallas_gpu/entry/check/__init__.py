# SPDX-License-Identifier: Apache-2.0
"""The check pass over a complete jaxpr; one file per family."""

from __future__ import annotations

from pallas_gpu.entry.check import (
    cluster,
    control,
    cp_async,
    debug,
    positions,
    results,
    rows,
    scatter,
    tma,
)
from pallas_gpu.entry.check.copies import prefetch
from pallas_gpu.entry.check.equations import (
    check_jaxpr,
    features,
    require_element_types,
    require_features,
    require_indexable,
)
from pallas_gpu.entry.check.griddepcontrol import check_dependencies
from pallas_gpu.entry.check.grids import launch_control
from pallas_gpu.entry.check.mbarrier import check_waits
from pallas_gpu.entry.check.positions import require_axis_name
from pallas_gpu.entry.check.references import check_inputs, written
from pallas_gpu.entry.check.tma import check_copy
from pallas_gpu.entry.check.wgmma import require_transforms
from pallas_gpu.primitives._engines import Side, check_threads

__all__ = [
    "Side",
    "check_copy",
    "check_dependencies",
    "check_inputs",
    "check_jaxpr",
    "check_threads",
    "check_waits",
    "cluster",
    "control",
    "cp_async",
    "debug",
    "launch_control",
    "positions",
    "prefetch",
    "require_axis_name",
    "require_element_types",
    "features",
    "require_features",
    "require_indexable",
    "require_transforms",
    "results",
    "rows",
    "scatter",
    "tma",
    "written",
]
