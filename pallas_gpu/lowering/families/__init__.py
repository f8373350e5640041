# SPDX-License-Identifier: Apache-2.0
"""One file per family, with its relations and its emit rules.

An operation of which an emitter is the rule stands in the table of `direct.py` instead.

Importing this package imports every file in it and in its inner rooms, which registers
all rules: a new family is a new file.
"""

import importlib
import pkgutil

for _module in sorted(
    module.name for module in pkgutil.walk_packages(__path__, f"{__name__}.")
):
    importlib.import_module(_module)
