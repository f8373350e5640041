# SPDX-License-Identifier: Apache-2.0
"""Operations of JAX that consist of others, a file per family; see `entry/expand.py`.

Importing this package imports every file in it, which registers all rules: a new family
is a new file.
"""

import importlib
import pkgutil

for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")
