# SPDX-License-Identifier: Apache-2.0
"""`do_bench`: how long functions take on the device, and which kernels they launch."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallas_gpu import errors, expect
from pallas_gpu.runtime import cupti
from pallas_gpu.testing import calling
from pallas_gpu.testing.arguments import Repeated
from pallas_gpu.testing.rounds import Rounds, Timer

_DEFAULT_ROUNDS = 40
_MOST_ROUNDS = 100_000
_MOST_SECONDS = 86_400.0


def functions(value: Any, what: str) -> Any:
    """Accepts a function, or a mapping of names to functions."""
    if not isinstance(value, Mapping):
        return expect.function(value, what)
    if not value or not all(isinstance(name, str) for name in value):
        raise expect.wrong_type(
            what,
            "a function or a mapping of names to functions",
            "a function, or {'name': function, ...}",
            value,
            "name each of the functions",
        )
    return {name: expect.function(f, f"{what}[{name!r}]") for name, f in value.items()}


def seconds(minimum: float = 0.0) -> expect.Rule:
    """Accepts a finite time in seconds."""

    def check(value: Any, what: str) -> float:
        number = expect.number(value, what)
        if minimum <= number <= _MOST_SECONDS:
            return number
        raise errors.ArgumentError(
            f"{what} is out of range",
            expected=f"{minimum:g} to {_MOST_SECONDS:g} seconds",
            got=expect.shown(value),
            hint="it is a time in seconds",
        )

    return check


def _quantiles(value: Any, what: str) -> tuple[float, ...]:
    numbers = value if expect.is_sequence(value) else (value,)
    found = tuple(expect.number(x, what) for x in numbers)
    if found and all(0 <= x <= 1 for x in found):
        return found
    raise errors.ArgumentError(
        f"{what} are out of range",
        expected="numbers from 0 to 1, at least one",
        got=expect.shown(value),
        hint="0.5 is the median",
    )


def _inputs(value: Any, what: str) -> tuple[tuple[Any, ...], ...]:
    is_nested = expect.is_sequence(value) and all(map(expect.is_sequence, value))
    if is_nested and len(value):
        return tuple(tuple(each) for each in value)
    raise expect.wrong_type(
        what,
        "a sequence of sequences of arguments",
        "[(a, b), (c, d)]",
        value,
        "pass the arguments of one call as *args",
    )


@expect.arguments()
def kernel_times(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """Returns the kernels that a call launches, with their times on the device.

    Issued by: the host. Since: any GPU of JAX. CUPTI records the times, which exclude
    the host and the launch. Call the function once before, so that it is compiled.

    Args:
      run: a function without arguments; its results are awaited.

    Returns:
      The name of each kernel and its milliseconds, in the order of the launches.

    Raises:
      ArgumentTypeError: the function takes arguments.
      NoGpuError: JAX has no CUDA device.
      UnsupportedError: another profiler uses CUPTI.
    """
    return cupti.kernel_times(functools.partial(calling.call, "kernel_times", run))


@expect.arguments(
    f=functions,
    inputs=expect.optional(_inputs),
    warmup=expect.integer(0, _MOST_ROUNDS),
    rounds=expect.optional(expect.integer(1, _MOST_ROUNDS)),
    seconds=expect.optional(seconds()),
    quantiles=expect.optional(_quantiles),
    pause_seconds=seconds(),
)
def do_bench(
    f: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    *args: Any,
    inputs: Sequence[Sequence[Any]] | None = None,
    warmup: int = 1,
    rounds: int | None = None,
    seconds: float | None = None,
    quantiles: Sequence[float] | None = None,
    flush_l2: bool = True,
    pause_seconds: float = 0.05,
    timer: Timer | None = None,
) -> Any:
    """Measures how long a function takes on the device, or several, interleaved.

    Since: any GPU of JAX. Issued by: the host.

    CUPTI records the time of each kernel on the device, so the host and the launch are
    excluded; the time of a call is the sum over its kernels. A round is a pause, a call
    that is not counted, and one call of each function in a shuffled order, so that
    changes of the card's clock affect all alike. Functions are called as they are: pass
    jitted ones. They may be donated arrays and write to references: each call gets
    copies of these, made before the round, and the arguments remain as they are.

    Args:
      f: a function of `args`, or a mapping of names to such functions.
      *args: arguments of every call: arrays, `jax.Ref`s, pytrees of them.
      inputs: instead of `args`, sequences of arguments that the calls use in turn.
      warmup: rounds that are not counted, after the first calls.
      rounds: rounds; default: 40, or as many as fit `seconds`.
      seconds: the measurement ends after the round in which this time has passed.
      quantiles: numbers from 0 to 1; default: the median alone.
      flush_l2: fill the L2 with other data before each call, so that arguments are read
        from the card's memory.
      pause_seconds: pause before each round, in which the card cools. Without one no
        call is left out: what follows a pause takes longer.
      timer: replaces CUPTI: runs a function, waits for its results, and returns the
        name and the milliseconds of each of its kernels.

    Returns:
      The median in milliseconds, or a tuple of the quantiles; a dict of these by name
      if `f` is a mapping.

    Raises:
      NoGpuError: JAX has no CUDA device, and there is no timer.
      UnsupportedError: another profiler uses CUPTI.
      ArgumentError: a function launches no kernel, or an argument is out of range.

    Example:
      >>> plgpu.testing.do_bench(jax.jit(jnp.matmul), a, b)
      0.174
    """
    if args and inputs is not None:
        raise errors.ArgumentError(
            "do_bench: arguments are given twice",
            expected="*args or inputs",
            got="both",
            hint="omit one of them",
        )
    named = f if isinstance(f, Mapping) else {getattr(f, "__name__", "function"): f}
    calls = {
        name: Repeated("do_bench", function, inputs or [args])
        for name, function in named.items()
    }
    measured = Rounds(
        calls, timer=timer, flush_l2=flush_l2, pause_seconds=pause_seconds
    )
    if rounds is None:
        rounds = _DEFAULT_ROUNDS if seconds is None else _MOST_ROUNDS
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    for _ in range(warmup):
        measured.run()
    for _ in range(rounds):
        measured.run()
        if time.monotonic() >= deadline:
            break
    counted = {name: times[warmup:] for name, times in measured.times.items()}
    found = {name: _summary(times, quantiles) for name, times in counted.items()}
    return found if isinstance(f, Mapping) else next(iter(found.values()))


def _summary(times: Sequence[float], quantiles: Sequence[float] | None) -> Any:
    if quantiles is None:
        return statistics.median(times)
    return tuple(quantile(times, q) for q in quantiles)


def quantile(times: Sequence[float], q: float) -> float:
    """Returns a quantile, linearly interpolated between the two nearest times."""
    ordered = sorted(times)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
