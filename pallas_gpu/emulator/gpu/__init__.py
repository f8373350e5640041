# SPDX-License-Identifier: Apache-2.0
"""The emulated GPU, with one rule file per family; importing it registers the rules.

Importing this package imports every file in it and in its inner rooms: a new family is
a new file.
"""

import importlib
import pkgutil

from pallas_gpu.emulator.engine.operations import control as control
from pallas_gpu.emulator.engine.operations import references as references

for _module in sorted(
    module.name for module in pkgutil.walk_packages(__path__, f"{__name__}.")
):
    importlib.import_module(_module)
