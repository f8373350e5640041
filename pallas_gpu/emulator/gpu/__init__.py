# SPDX-License-Identifier: Apache-2.0
"""The emulated GPU, with one rule file per family.

Importing it imports every file in it and in its inner rooms, which registers the rules.
"""

import importlib
import pkgutil

from pallas_gpu.emulator.engine import control as control  # its rules, too

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
