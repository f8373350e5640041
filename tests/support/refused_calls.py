# SPDX-License-Identifier: Apache-2.0
"""Calls that are refused as rows of tables: the call, the class, and the text."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu.errors import PallasGpuError


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A call that is refused.

    Attributes:
      error: the class of the error, exactly.
      what: how its first sentence begins.
      function, args, options: the call.
      got: part of the row `got`, or of the whole text.
      hint: part of the hint.
    """

    error: type[PallasGpuError]
    what: str
    function: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    got: str
    hint: str

    def check(self) -> None:
        """Calls, and looks at the error."""
        with pytest.raises(self.error) as caught:
            self.function(*self.args, **self.options)
        error = caught.value
        assert type(error) is self.error
        assert error.what.startswith(self.what), error.what
        assert error.expected and error.hint
        assert self.hint in error.hint
        assert self.got in str(error.got) or self.got in str(error)


def no(error, what, function, *args, got="", hint="", name=None, **options):
    """A row; the text begins with the name of the function, or another one."""
    name = function.__name__ if name is None else name
    what = f"{name}: {what}" if name else what
    return Refusal(error, what, function, args, options, got, hint)


def each(error, what, function, *args, changes, **options):
    """Rows of one text: calls that differ in some options."""
    return [no(error, what, function, *args, **{**options, **c}) for c in changes]


def named(*tables: list[Refusal]) -> dict[str, Refusal]:
    """The rows of tables by what is said, and their numbers."""
    rows = [row for table in tables for row in table]
    return {f"{row.what}{row.got}-{i}": row for i, row in enumerate(rows)}


def zeros(*shape: int, dtype: Any = jnp.float16) -> Any:
    """An operand."""
    return np.zeros(shape, dtype)


def total(function: Any, x: Any) -> Any:
    """The derivative of the sum of a function."""
    return jax.grad(lambda x: function(x).astype(jnp.float32).sum())(x)
