# SPDX-License-Identifier: Apache-2.0
"""What the lockstep machine does not execute, and the list of it."""

from __future__ import annotations


class NotModelled(Exception):  # noqa: N818, it is no mistake of the kernel
    """An operation or a launch that the lockstep machine does not execute.

    Attributes:
      operation: the operation's name, as in `KNOWN_GAPS`.
    """

    def __init__(self, operation: str, detail: str = "") -> None:
        super().__init__(f"lockstep does not execute {operation}. {detail}")
        self.operation = operation


# Kernels with these are lowered and not executed by `everywhere.check`; any other
# operation that is not modelled fails the test. The list may only shrink.
KNOWN_GAPS: frozenset[str] = frozenset()
