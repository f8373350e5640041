# SPDX-License-Identifier: Apache-2.0
"""The emulator of SparseCores, on the engine of the emulator of GPUs.

Importing it registers the rules of every family; a new family is a new file.
"""

import importlib
import pkgutil

from jax import lax

from pallas_gpu import _jax
from pallas_gpu.emulator import gpu as gpu  # registers what is the same on any machine
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import debug, registers
from pallas_gpu.primitives.sync import delay
from pallas_gpu.sparsecore.types import MACHINE

_EMULATE = registry.RuleKind.EMULATE
for _primitive in (
    lax.axis_index_p, lax.scan_p, lax.while_p, lax.cond_p, _jax.get_p, _jax.swap_p,
    _jax.addupdate_p, _jax.debug_print_p, debug.debug_print_p, debug.debug_check_p,
    registers.multiple_of_p, delay.delay_p,
):  # fmt: skip
    _rule = registry.rules(_EMULATE)[_primitive]
    registry.register(_primitive, _EMULATE, MACHINE)(_rule)
for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
