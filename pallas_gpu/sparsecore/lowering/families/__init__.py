# SPDX-License-Identifier: Apache-2.0
"""One file per family, with its emit rules; importing the package registers them."""

import importlib
import pkgutil

for _module in sorted(
    module.name for module in pkgutil.walk_packages(__path__, f"{__name__}.")
):
    importlib.import_module(_module)
