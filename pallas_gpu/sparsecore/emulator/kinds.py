# SPDX-License-Identifier: Apache-2.0
"""Programs for both kinds of subcores: each thread knows its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu.primitives import _registry as registry
from pallas_gpu.sparsecore.emulator.cores import Subcore
from pallas_gpu.sparsecore.primitives.kinds import on_vector_subcore_p
from pallas_gpu.sparsecore.types import MACHINE


@registry.register(on_vector_subcore_p, registry.RuleKind.EMULATE, MACHINE)
def _on_vector_subcore(thread: Subcore, _: Any, **__: Any) -> list[Any]:
    return [np.bool_(thread.index is not None)]
