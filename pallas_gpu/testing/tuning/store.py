# SPDX-License-Identifier: Apache-2.0
"""Results of the tuner on disk: one JSON file for each function, key and card.

A file is written whole under another name and then renamed, so that readers never see a
part of it. A file that cannot be read as a result is renamed, too, and reported.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pallas_gpu import errors
from pallas_gpu.runtime import cache_files

FORMAT = 1
_FIELDS = {"format": int, "identity": dict, "config": str, "index": int, "kernel": str}
_LOCK_POLL_SECONDS = 0.05


def folder(given: str | os.PathLike[str] | None) -> Path:
    """Returns the folder of the results: given, of the environment, or the user's."""
    if given is not None:
        return Path(given)
    return cache_files.folder("tuning", "PALLAS_GPU_TUNING_DIR")


def path_of(place: Path, function: str, digest: str) -> Path:
    """Returns the file of a result: the function's name is for people."""
    name = re.sub(r"[^\w.-]+", "_", function)[-60:]
    return place / f"{name}-{digest}.json"


def load(path: Path, identity: dict[str, str]) -> dict[str, Any] | None:
    """Returns a stored result; None if there is none for this identity.

    Args:
      path: its file.
      identity: what it must have been measured for.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        set_aside(path, f"{type(error).__name__}: {error}")
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        set_aside(path, f"not JSON: {error}")
        return None
    if (problem := _problem(record)) is not None:
        set_aside(path, problem)
        return None
    return record if record["identity"] == identity else None


def _problem(record: Any) -> str | None:
    if not isinstance(record, dict):
        return f"a JSON {type(record).__name__}, not an object"
    for field, kind in _FIELDS.items():
        if not isinstance(record.get(field), kind):
            return f"no valid field {field!r}"
    if record["format"] != FORMAT:
        return f"format {record['format']}, not {FORMAT}"
    return None


def set_aside(path: Path, problem: str) -> None:
    """Renames a damaged file, and warns."""
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    try:
        os.replace(path, aside)
        outcome = f"it is now {aside.name}, and the function is tuned again"
    except FileNotFoundError:
        outcome = "another process has set it aside"
    except OSError as error:
        outcome = f"it cannot be renamed ({error}); the function is tuned again"
    warnings.warn(
        f"the tuning file {path} is damaged ({problem}): {outcome}",
        errors.TuningWarning,
        stacklevel=2,
    )


def save(path: Path, record: dict[str, Any]) -> None:
    """Writes a result; a folder that cannot be written to is a warning."""
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    try:
        cache_files.replace(path, text.encode())
    except OSError as error:
        warnings.warn(
            f"the result of tuning is not stored: {path}: {error}",
            errors.TuningWarning,
            stacklevel=2,
        )


@contextlib.contextmanager
def locked(path: Path, patience_seconds: float) -> Iterator[None]:
    """Lets one process at a time tune what a file is for.

    The lock ends with its process. Where there are no file locks, and after
    `patience_seconds`, processes tune at the same time, and the last result stays.
    """
    try:
        import fcntl

        path.parent.mkdir(parents=True, exist_ok=True)
        stream = open(path.with_suffix(".lock"), "a")  # noqa: SIM115 - closed below
    except (ImportError, OSError):
        yield
        return
    deadline = time.monotonic() + patience_seconds
    with stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    break
                time.sleep(_LOCK_POLL_SECONDS)
        yield
