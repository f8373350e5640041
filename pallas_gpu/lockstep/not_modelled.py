# SPDX-License-Identifier: Apache-2.0
"""What the lockstep machine does not execute."""

from __future__ import annotations

from pallas_gpu import errors


class NotModelled(errors.NotModelledError):
    """An operation or a launch that the lockstep machine does not execute.

    Attributes:
      operation: the operation's name.
    """

    def __init__(self, operation: str, detail: str = "") -> None:
        super().__init__(
            f"the machine that executes emitted code does not know {operation}",
            got=detail or None,
            hint="run the kernel itself in the emulator: interpret=True",
        )
        self.operation = operation
