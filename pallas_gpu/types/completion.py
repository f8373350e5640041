# SPDX-License-Identifier: Apache-2.0
"""What `dir`, and with it tab completion, shows of the objects that users handle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


def shows[T](*names: str, fields: bool = True) -> Callable[[type[T]], type[T]]:
    """Returns a class decorator: `dir` of an instance lists its public names only.

    The other methods are for the rest of this package.

    Args:
      names: methods and properties to show.
      fields: whether a dataclass shows its fields, too.
    """

    def decorate(cls: type[T]) -> type[T]:
        def listed(self: Any) -> list[str]:
            public = set(names)
            if fields and dataclasses.is_dataclass(self):
                public |= {field.name for field in dataclasses.fields(self)}
            special = {name for name in object.__dir__(self) if name.startswith("__")}
            return sorted(public | special)

        cls.__dir__ = listed  # type: ignore[method-assign, assignment]
        return cls

    return decorate
