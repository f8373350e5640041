# SPDX-License-Identifier: Apache-2.0
"""Files that outlive a process, in the user's folder of caches."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def folder(name: str, variable: str) -> Path:
    """Returns the folder that a variable names, or one in the user's folder of caches.

    Args:
      name: of this package's folder there.
      variable: of the environment.
    """
    if named := os.environ.get(variable):
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches, "pallas_gpu", name)


def replace(path: Path, content: bytes) -> None:
    """Writes a whole file; its folder is made.

    It is written under another name, `.NAME.RANDOM`, and then renamed, so that readers
    never see a part of it. A process that is killed meanwhile leaves that file.

    Raises:
      OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as stream:
            stream.write(content)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
