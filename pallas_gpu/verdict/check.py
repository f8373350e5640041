# SPDX-License-Identifier: Apache-2.0
"""`check`: runs what a function launches in several orders, without raising."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gpu import arch, errors, expect, types
from pallas_gpu.emulator.recorder import Recorder
from pallas_gpu.entry import interpret
from pallas_gpu.entry.assumed_target import assuming
from pallas_gpu.verdict.verdict import Verdict

# The default number of schedules: three of each mode of completion but one.
_ORDERS = 8
# Random integers are smaller, so that they can be positions in most arrays.
_INTEGERS_BELOW = 4


# How long each launch is run in one order after the other.
_SECONDS = 60.0


def _number(value: Any, what: str) -> int | str:
    if isinstance(value, str):
        return expect.choice("all")(value, what)
    return expect.integer(1, unit="schedules")(value, what)


def _budget(value: Any, what: str) -> float:
    seconds = expect.number(value, what)
    if seconds > 0:
        return seconds
    raise errors.ArgumentError(
        f"{what}: there is no time to run anything",
        expected="a number of seconds above 0",
        got=value,
    )


@expect.arguments("check", orders=_number, seconds=_budget)
def schedules(
    *,
    orders: int | Literal["all"] = _ORDERS,
    seconds: float = _SECONDS,
    **options: Any,
) -> tuple[types.InterpretParams, float | None]:
    """Returns the parameters of a check; see `check`."""
    if not isinstance(orders, str):
        return types.InterpretParams(**options, schedules=orders), None
    params = types.InterpretParams(**options)
    if params.emitted:
        raise errors.UnsupportedError(
            "check: the orders of emitted code are not explored",
            expected="a number of schedules for emitted=True",
            got='orders="all"',
            hint='check the kernel with orders="all", and its code with a number',
        )
    return params, seconds


@expect.arguments()
def check(
    fn: Callable[..., Any],
    *,
    orders: int | Literal["all"] = _ORDERS,
    seconds: float = _SECONDS,
    target: str | arch.Target | None = None,
    **options: Any,
) -> Callable[..., Verdict]:
    """Returns a function that runs `fn` in the emulator and returns a verdict.

    A run goes on after a mistake where that makes sense: a value that raced is kept, an
    access out of bounds has no effect outside the array, and a use of memory that
    nobody has written is recorded once for its line. CTAs in a deadlock are dropped.

    Issued by: the host.

    Args:
      fn: a function of arrays, jitted or not, that calls kernels. A
        `jax.ShapeDtypeStruct` among its arguments stands for random elements: normally
        distributed floats, integers from 0 to 3.
      orders: how many schedules each launch runs in. Their seeds differ, and copies
        complete late, at once, or at random. "all": each order of its barriers, copies,
        semaphores and claims, up to equivalence, until one shows a mistake.
      seconds: how long each launch is run with `orders="all"`, about.
      target: that for which `fn` chooses kernels, as in `offline.compile`; default: as
        in an ordinary call.
      **options: of `InterpretParams`: `seed` of the first schedule, `max_steps` and so
        on. `emitted=True` checks the code that kernels are lowered to; a run of it ends
        at the first mistake. A kernel that contains inline code without `emulate` is
        checked in this way, and its coverage says so.

    Returns:
      A function of `fn`'s arguments, whose result is a `Verdict`. It raises what `fn`
      raises, but no mistakes in kernels.

    Raises:
      UnsupportedError: `orders="all"` of emitted code.
      ArgumentError, ArgumentTypeError, TargetError: an invalid option, or a function
        that calls no kernel.

    Example:
      >>> verdict = plgpu.check(f, orders=20)(x, jax.ShapeDtypeStruct((64,), "int32"))
      >>> print(verdict)
    """
    params, budget = schedules(orders=orders, seconds=seconds, **options)
    chosen = None if target is None else arch.target(target)

    def checked(*args: Any, **kwargs: Any) -> Verdict:
        args, kwargs = jax.tree.map(_Random(params.seed), (args, kwargs))
        results = None
        assumed = contextlib.nullcontext() if chosen is None else assuming(chosen)
        with assumed, checking(params, budget) as recorder:
            results = jax.block_until_ready(fn(*args, **kwargs))
        verdict = Verdict.of(recorder, results)
        if not verdict.coverage and verdict.clean:
            raise errors.ArgumentError(
                "the function does not call a kernel of pallas_gpu",
                expected="a function that calls a kernel() or pallas_call()",
                got=getattr(fn, "__name__", repr(fn)),
                hint="under jax.jit a launch whose results are not used does not take "
                "place",
            )
        return verdict

    return checked


@contextlib.contextmanager
def checking(
    params: types.InterpretParams, seconds: float | None = None
) -> Iterator[Recorder]:
    """Observes the launches inside; mistakes in kernels end the block without an error.

    Args:
      params: the schedules, and how each is run.
      seconds: how long each launch is run in other orders; None: in the schedules.
    """
    recorder = Recorder(seconds)
    given = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
    try:
        with interpret.force_gpu_interpret_mode(
            interpret.Observed(**given, recorder=recorder)
        ):
            yield recorder
            jax.effects_barrier()
    except errors.PallasGpuError as error:
        recorder.add([error.finding])


class _Random:
    """Returns arguments as they are, and random arrays for shapes.

    Args:
      seed: of the elements.
    """

    def __init__(self, seed: int):
        self._generator = np.random.default_rng(seed)

    def __call__(self, x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        dtype = jnp.dtype(x.dtype)
        if jnp.issubdtype(dtype, jnp.inexact):
            values = self._generator.standard_normal(x.shape)
        else:
            most = 2 if dtype == np.bool_ else int(jnp.iinfo(dtype).max) + 1
            below = min(_INTEGERS_BELOW, most)
            values = self._generator.integers(0, below, x.shape)
        return jnp.asarray(values).astype(dtype)
