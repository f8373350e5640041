# SPDX-License-Identifier: Apache-2.0
"""One of many bodies that differ little: in the emulator, lowered where that is said.

tests/ops/test_schedules.py lowers each configuration of a ready kernel under one
semantics, and tests/ops/test_compiled.py compiles it under the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.support import everywhere
from tests.support.semantics import BOTH


def check(
    make: Callable[[Any], Callable[..., Any]],
    args: Sequence[Any],
    expected: Any,
    executed: Sequence[Any] = (),
    *,
    semantics: Sequence[Any] = BOTH,
    on_gpu: bool = True,
    **tolerances: float,
) -> None:
    """As `everywhere.check`, but lowered where it is executed alone, or on a GPU.

    Args:
      make, args, expected: the body, as there.
      executed: semantics whose module is executed on the CPU.
      semantics: those under which the body lowers.
      on_gpu: False for kernels of another target than the tests' card.
      tolerances: as there.
    """
    everywhere.check(
        make,
        args,
        expected,
        semantics=semantics if on_gpu and everywhere.has_gpu() else executed,
        executed=executed,
        on_gpu=on_gpu,
        **tolerances,
    )
