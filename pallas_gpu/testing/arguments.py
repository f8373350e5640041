# SPDX-License-Identifier: Apache-2.0
"""Arguments of calls that are measured: each call finds them as the first one did."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu.testing import calling


class Repeated:
    """A function and the arguments of its calls, which use them in turn.

    A call that is donated an array deletes it, and one that is given a reference writes
    to it. So that the next one can be made, and an author keeps what is theirs, calls
    get copies of such arguments. Which arrays a call deletes shows after the first one,
    for which all are copied.
    """

    def __init__(self, who: str, f: Callable[..., Any], sets: Sequence[Sequence[Any]]):
        self._who, self._f = who, f
        self._sets = itertools.cycle([(tuple(args), i) for i, args in enumerate(sets)])
        self._donated: dict[int, set[int]] = {}

    def __call__(self) -> Any:
        """Calls the function with the next arguments."""
        return self.ready()()

    def ready(self) -> Callable[[], Any]:
        """Returns the next call; its arguments are on the device."""
        args, number = next(self._sets)
        leaves, tree = jax.tree.flatten(args)
        donated = self._donated.get(number)
        copies: dict[int, Any] = {}
        given = []
        for i, x in enumerate(leaves):
            is_copied = isinstance(x, jax.Ref) or (
                isinstance(x, jax.Array) and (donated is None or i in donated)
            )
            if is_copied and id(x) not in copies:
                copies[id(x)] = _copy(x)
            given.append(copies.get(id(x), x))
        fresh = jax.tree.unflatten(tree, given)

        def call() -> Any:
            result = calling.call(self._who, self._f, *fresh)
            if number not in self._donated:
                self._donated[number] = {
                    i
                    for i, x in enumerate(given)
                    if isinstance(x, jax.Array) and x.is_deleted()
                }
            return result

        return call


def _copy(x: Any) -> Any:
    if isinstance(x, jax.Ref):
        return jax.new_ref(jax.block_until_ready(jnp.copy(x[...])))
    return jax.block_until_ready(jnp.copy(x))
