# SPDX-License-Identifier: Apache-2.0
"""Calls that are refused: rows of tables, and their names in the texts.

@refused
@pytest.mark.parametrize("call", [call(ops.matmul, A, A)], ids=named)
def test_a_call_that_does_not_fit(call):
    call()
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gpu import CompilerParams

call = functools.partial


def calls(function: Any, *args: Any, changes: Sequence[dict[str, Any]], **options: Any):
    """Calls that differ in some options."""
    return [call(function, *args, **{**options, **each}) for each in changes]


def zeros(*shape: int, dtype: Any = jnp.float16) -> Any:
    """An operand."""
    return np.zeros(shape, dtype)


def derivative(function: Any, *args: Any, by: int | str, **options: Any) -> Any:
    """The derivative of the sum of a function by an argument."""
    given = {**dict(enumerate(args)), **options}

    def total(x):
        values = {**given, by: x}
        positional = [values.pop(i) for i in range(len(args))]
        return function(*positional, **values).astype(jnp.float32).sum()

    return jax.grad(total)(given[by])


def named(x: Any) -> str:
    """A call as it would be written, with types and shapes of its arrays."""
    if isinstance(x, functools.partial):
        rows = [named(a) for a in x.args]
        rows += [f"{name}={named(a)}" for name, a in x.keywords.items()]
        return f"{x.func.__name__}({', '.join(rows)})"
    if isinstance(x, np.ndarray):
        return f"{x.dtype}{x.shape}".replace(",)", ")")
    if isinstance(x, CompilerParams):
        return str(x.target)
    if dataclasses.is_dataclass(x):
        own = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
        default = vars(type(x))
        return named(
            functools.partial(
                type(x), **{k: v for k, v in own.items() if default.get(k) != v}
            )
        )
    return getattr(x, "__name__", None) or repr(x)
