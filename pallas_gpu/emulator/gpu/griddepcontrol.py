# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch: what earlier kernels do to GMEM before the wait.

The emulator runs kernels one after another. A kernel that waits for its prerequisites
is checked as if these accessed all of its arguments and results until the wait.
"""

from __future__ import annotations

from typing import Any

from pallas_gpu.emulator.gpu.machine.cta import Warpgroup
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.grids import griddepcontrol


@registry.register(griddepcontrol.wait_p, registry.RuleKind.EMULATE)
def _wait(wg: Warpgroup, *_: Any, **__: Any) -> None:
    earlier = wg.cta.device.earlier
    assert earlier is not None
    wg.clock[earlier.actor] = earlier.time


@registry.register(griddepcontrol.launch_dependents_p, registry.RuleKind.EMULATE)
def _launch_dependents(wg: Warpgroup, *_: Any, **__: Any) -> None:
    """Nothing of this kernel depends on it."""
