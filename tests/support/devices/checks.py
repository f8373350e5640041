# SPDX-License-Identifier: Apache-2.0
"""Runs checks on the devices that are there, and prints what has come of each."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax


def run(checks: Mapping[str, Callable[[], Any]]) -> int:
    """Returns how many checks have failed.

    One that measures something returns it, with the unit.
    """
    failed = 0
    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}", flush=True)
    for name, check in checks.items():
        start = time.monotonic()
        try:
            found = check()
            said = "ok" if found is None else f"ok {found[0]:.2f} {found[1]}"
        except Exception as error:
            failed += 1
            said = "".join(traceback.format_exception(error))[-1500:]
        print(f"{name:28} {time.monotonic() - start:5.1f} s  {said}", flush=True)
    return failed
