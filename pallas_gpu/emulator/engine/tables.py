# SPDX-License-Identifier: Apache-2.0
"""State of families that is stored with a thread or a group, by a typed key.

A thread does not depend on the types of the streams that families store with it. A
family declares a `Key` for its own type and retrieves its state with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Key[Owner, State]:
    """The key of a state of one type.

    Attributes:
      what: for messages.
      make: returns the initial state of an owner.
    """

    what: str
    make: Callable[[Owner], State]


class Table[Owner]:
    """The states of one owner, each created on first use."""

    __slots__ = ("_owner", "_states")

    def __init__(self, owner: Owner):
        self._owner = owner
        self._states: dict[Key[Any, Any], Any] = {}

    def of[State](self, key: Key[Owner, State]) -> State:
        """Returns the state of a key."""
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = key.make(self._owner)
        return state

    def find[State](self, key: Key[Owner, State]) -> State | None:
        """Returns the state of a key if it has been created."""
        return self._states.get(key)
