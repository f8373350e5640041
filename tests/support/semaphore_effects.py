# SPDX-License-Identifier: Apache-2.0
"""Effects of the arguments of semaphores' operations.

Rows of the table of tests/public/test_effects.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pallas_gpu as plgpu
from tests.support import effects as see


def calls(name: str, argument: str, *values: Any) -> list[str]:
    """Kernels that call an operation with different values of an argument."""
    call = getattr(plgpu, name)
    return see.bodies(*(lambda e, v=v: call(e.q, **{argument: v}) for v in values))


def parallel(*increments: int) -> list[str]:
    """Kernels that signal one semaphore with different increments."""
    signal, one = plgpu.semaphore_signal_parallel, plgpu.SemaphoreSignal
    return see.bodies(*(lambda e, n=n: signal(one(e.q, inc=n)) for n in increments))


def several() -> str:
    """A kernel with two signals at once."""
    (text,) = see.bodies(
        lambda e: plgpu.semaphore_signal_parallel(*2 * [plgpu.SemaphoreSignal(e.q)])
    )
    return text


EFFECTS: dict[str, Callable[[], list[str]]] = {
    "semaphore_signal.inc": lambda: calls("semaphore_signal", "inc", 1, 2),
    "semaphore_signal.memory_scope": lambda: calls(
        "semaphore_signal", "memory_scope", "sys", "gpu"
    ),
    "semaphore_wait.value": lambda: calls("semaphore_wait", "value", 1, 2),
    "semaphore_wait.decrement": lambda: calls(
        "semaphore_wait", "decrement", True, False
    ),
    "semaphore_wait.memory_scope": lambda: calls(
        "semaphore_wait", "memory_scope", "sys", "gpu"
    ),
    "SemaphoreSignal.inc": lambda: parallel(1, 2),
    "semaphore_signal_parallel.signals": lambda: [*parallel(1), several()],
}
