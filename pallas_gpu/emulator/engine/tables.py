# SPDX-License-Identifier: Apache-2.0
"""State of families that is stored with a thread or a group, by a typed key.

A thread does not depend on the types of the streams that families store with it. A
family declares a `Key` for its own type and retrieves its state with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

State = dict["Key[Any, Any]", Any]


class HasState(Protocol):
    """What families store state with.

    Attributes:
      state: by key, each created on first use.
    """

    state: State


@dataclasses.dataclass(frozen=True, eq=False)
class Key[Owner: HasState, Stored]:
    """The key of a state of one type.

    Attributes:
      what: for messages.
      make: returns the initial state of an owner.
    """

    what: str
    make: Callable[[Owner], Stored]

    def of(self, owner: Owner) -> Stored:
        """Returns the state of an owner."""
        stored = owner.state.get(self)
        if stored is None:
            stored = owner.state[self] = self.make(owner)
        return stored

    def find(self, owner: Owner) -> Stored | None:
        """Returns the state of an owner if it has been created."""
        return owner.state.get(self)
