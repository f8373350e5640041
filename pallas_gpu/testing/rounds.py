# SPDX-License-Identifier: Apache-2.0
"""Rounds of a measurement: each calls every candidate once, in another order."""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import errors
from pallas_gpu.runtime import cupti, register
from pallas_gpu.testing import calling
from pallas_gpu.testing.arguments import Repeated

# Runs a function, waits for its results, and returns the name and the milliseconds of
# each kernel that it launched, in order.
Timer = Callable[[Callable[[], Any]], Sequence[tuple[str, float]]]


class Rounds:
    """The times of some calls, measured in rounds.

    A round is a pause, a call that is not counted, and one call of each candidate, so
    that changes of the card's clock affect all of them alike. What follows the pause
    took 1.03 times as long as what came second (a product of 4096 on an H200): a single
    candidate would always be there. The order is random, but each candidate has each
    place in it equally often: in 40 shuffled orders of two candidates the one with 23
    first places lost. What the calls have to find is made before the pause, where they
    say so (`Repeated.ready`). The timer records a whole
    round at once; the names of the kernels, learnt before, say which call launched
    which of them.

    Attributes:
      times: the milliseconds of the calls so far, by the candidates' names.
    """

    def __init__(
        self,
        calls: Mapping[str, Callable[[], Any]],
        *,
        timer: Timer | None = None,
        flush_l2: bool = True,
        pause_seconds: float = 0.0,
    ):
        """Learns which kernels each call launches; this calls each once or twice."""
        self._calls = dict(calls)
        if timer is None:
            cupti.require_gpu()
            self._timer: Timer = cupti.kernel_times
        else:
            self._timer = functools.partial(calling.times, "timer", timer)
        self._pause_seconds = pause_seconds
        self._shuffle = random.Random(0).shuffle
        self._orders: list[list[str]] = []
        self._flush = _flush_l2 if flush_l2 else None
        self._flush_kernels = self._kernels(self._flush) if self._flush else ()
        self._kernels_of = {n: self._kernels(call) for n, call in self._calls.items()}
        self.times: dict[str, list[float]] = {name: [] for name in self._calls}

    def _kernels(self, call: Callable[[], Any]) -> tuple[str, ...]:
        jax.block_until_ready(call())  # the first call may compile
        return tuple(name for name, _ in self._timer(_ready(call)))

    def run(self, names: Iterable[str] | None = None) -> None:
        """Measures one round of all candidates, or of those that are named.

        Raises:
          ArgumentError: a candidate launches no kernel on the GPU.
        """
        order = self._order(list(self._calls if names is None else names))
        # As before the others, another candidate is before the first, if there is one.
        uncounted = [order[-1]] if self._pause_seconds else []
        names = [*uncounted, *order]
        ready = [_ready(self._calls[name]) for name in names]
        if self._pause_seconds:
            time.sleep(self._pause_seconds)
        spent = self._timer(lambda: [self._one(call) for call in ready])
        divided = self._divided(names, spent)
        if divided is None:
            # A call that launches other kernels than before is measured by itself.
            divided = [self._alone(name) for name in names]
        counted = zip(names, divided, strict=True)
        for name, milliseconds in itertools.islice(counted, len(uncounted), None):
            self.times[name].append(milliseconds)

    def _order(self, names: list[str]) -> list[str]:
        if not self._orders or set(self._orders[0]) != set(names):
            self._shuffle(names)
            self._orders = [names[i:] + names[:i] for i in range(len(names))]
            self._shuffle(self._orders)
        return self._orders.pop()

    def _one(self, call: Callable[[], Any]) -> Any:
        if self._flush is not None:
            self._flush()
        return call()

    def _divided(
        self, order: Sequence[str], spent: Sequence[tuple[str, float]]
    ) -> list[float] | None:
        """Returns the time of each call; None if the kernels are not those expected."""
        position, divided = 0, []
        for name in order:
            position += len(self._flush_kernels)
            end = position + len(self._kernels_of[name])
            own = spent[position:end]
            if not own or tuple(kernel for kernel, _ in own) != self._kernels_of[name]:
                return None
            divided.append(sum(milliseconds for _, milliseconds in own))
            position = end
        return divided if position == len(spent) else None

    def _alone(self, name: str) -> float:
        ready = _ready(self._calls[name])
        if self._flush is not None:
            jax.block_until_ready(self._flush())
        spent = self._timer(ready)
        if not spent:
            raise errors.ArgumentError(
                f"{name}: the function launches no kernel on the GPU",
                expected="a function that runs on the GPU each time it is called",
                got="no kernel that the timer recorded",
                hint="pass the function itself and its arguments, which are on the GPU",
            )
        return sum(milliseconds for _, milliseconds in spent)


def _ready(call: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a call, with what it has to find."""
    return call.ready() if isinstance(call, Repeated) else call


@functools.cache
def _flush_inputs() -> tuple[Callable[[Any], Any], Any]:
    # Twice the L2, read and not written: what is evicted later needs no write-back,
    # which would compete with the measured kernel.
    elements = 2 * register.attached_target().l2_bytes // 4
    with jax.default_device(cupti.first_gpu()):
        return jax.jit(jnp.sum), jnp.ones((elements,), jnp.float32)


def _flush_l2() -> Any:
    read, array = _flush_inputs()
    return read(array)
