# SPDX-License-Identifier: Apache-2.0
"""One body, every way to run it: emulator, emitted module, and a GPU if there is one.

The module that the lowering emits is executed on the CPU in lockstep. Lowering and GPU
take the body under both semantics. The tiers that do not run everything execute the
module of one of them, which the test's name chooses; the other one's where it is known
to have been another module when it was last executed (`tests/support/executions.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import pallas_gpu as plgpu
from tests.support import executions, tiers
from tests.support.lockstep import kernels as in_lockstep
from tests.support.semantics import BOTH, Traced


def has_gpu() -> bool:
    """True when JAX sees a CUDA device."""
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def check(
    make: Callable[[Any], Callable[..., Any]],
    args: Sequence[Any],
    expected: Any,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    emulate: bool = True,
    semantics: Sequence[Any] = BOTH,
    executed: Sequence[Any] = BOTH,
    on_gpu: bool = True,
) -> None:
    """Runs `make(interpret)(*args)` everywhere and compares with `expected`.

    Args:
      make: takes `interpret` and returns the function to test; it is called once, with
        parameters for the emulator, which the lowering ignores.
      args: its arguments.
      expected: pytree of arrays.
      atol, rtol: tolerances of `np.testing.assert_allclose`; zero is exact.
      emulate: False where the emulator is not to be asked.
      semantics: under which the body is lowered.
      executed: those of them whose module is executed on the CPU.
      on_gpu: False for kernels of another target than the tests' card.
    """
    traced = Traced(make(plgpu.InterpretParams(seed=1)), args)
    if emulate:
        _compare(traced.as_traced(*args), expected, atol, rtol)
    for choice in semantics:
        lowered = in_lockstep.lower_traced(traced.lowered_under(choice), args)
        if choice in executed:
            run = executions.Execution(
                str(choice), lowered.kernels, (args, expected, atol, rtol)
            )
            if run.is_due(tiers.one_of(executions.test_name(), executed) is choice):
                _compare(lowered.run(), expected, atol, rtol)
                run.record()
        if on_gpu and has_gpu():
            function = traced.on_gpu(choice)
            with jax.default_device(jax.devices("cuda")[0]):
                on_gpu = jax.device_put(list(args), jax.devices("cuda")[0])
                _compare(jax.jit(function)(*on_gpu), expected, atol, rtol)


def _compare(got: Any, expected: Any, atol: float, rtol: float) -> None:
    got_leaves, expected_leaves = jax.tree.leaves(got), jax.tree.leaves(expected)
    assert len(got_leaves) == len(expected_leaves)
    for a, b in zip(got_leaves, expected_leaves, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        if a.dtype.kind not in "biu":
            a = a.astype(np.float64)
        if b.dtype.kind not in "biu":
            b = b.astype(np.float64)
        np.testing.assert_allclose(a, b, atol=atol, rtol=rtol)


def elementwise(
    body: Callable[..., Any], out_dtype: Any, *, shape=(64, 128), layout: Any = None
) -> Callable[[Any], Callable[..., Any]]:
    """Returns `make` for a kernel that applies `body` to whole arrays."""

    def kernel_body(*refs):
        *inputs, out = refs
        values = [
            ref[...]
            if layout is None
            else plgpu.load(ref, layout=layout, optimized=False)
            for ref in inputs
        ]
        out[...] = body(*values).astype(out.dtype)

    return kernel(kernel_body, jax.ShapeDtypeStruct(shape, out_dtype))


def kernel(
    body: Callable[..., None],
    out: Any = (),
    *scratch: Any,
    target: str | None = None,
    **options: Any,
) -> Callable[[Any], Callable[..., Any]]:
    """Returns `make` for a kernel.

    Args:
      body: of the kernel.
      out: its results: their types, or arrays of these types.
      scratch: its scratch_types.
      target: of its compiler_params.
      options: others of `plgpu.kernel`, where `grid`, `cluster` and `threads` may be
        sizes by name, as {"i": 4}.
    """
    for sizes, names in (("grid", "grid_names"), ("cluster", "cluster_names")):
        if isinstance(options.get(sizes), dict):
            options[names] = tuple(options[sizes])
            options[sizes] = tuple(options[sizes].values())
    if "threads" in options:
        ((name, count),) = options.pop("threads").items()
        options |= {"num_threads": count, "thread_name": name}
    if target is not None:
        options["compiler_params"] = plgpu.CompilerParams(target=target)
    if scratch:
        options["scratch_types"] = scratch
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), out)

    def make(interpret=None):
        return plgpu.kernel(body, out_type=types, interpret=interpret, **options)

    return make


OF_CHECK = {"atol", "rtol", "emulate", "semantics", "executed", "on_gpu"}


def run(
    body: Callable[..., None],
    args: Sequence[Any],
    expected: Any,
    *scratch: Any,
    out: Any = None,
    **options: Any,
) -> None:
    """Checks a kernel, whose results have the types of `expected` or of `out`.

    Takes the options of `kernel` and of `check`.
    """
    of_check = {name: options.pop(name) for name in OF_CHECK & options.keys()}
    make = kernel(body, expected if out is None else out, *scratch, **options)
    check(make, args, expected, **of_check)


OF_EMULATOR = {field.name for field in dataclasses.fields(plgpu.InterpretParams)}


def emulate(
    body: Callable[..., None], args: Sequence[Any], out: Any, *scratch: Any, **options
) -> Any:
    """Returns the results of a kernel in the emulator.

    Takes the options of `kernel` and the fields of `InterpretParams`.
    """
    params = {name: options.pop(name) for name in OF_EMULATOR & options.keys()}
    make = kernel(body, out, *scratch, **options)
    return make(plgpu.InterpretParams(**params))(*args)


def tests(check: Callable[..., None], *args: Any, **options: Any) -> Any:
    """Makes a test of a function, usually a body: calls check(body, *args, **options).

    Returns a decorator; the test has the name of the function.
    """

    def test_of(body: Callable[..., Any]) -> Callable[[], None]:
        def test():
            check(body, *args, **options)

        # Not functools.wraps: pytest would take the references for fixtures.
        test.__name__, test.__doc__ = body.__name__, body.__doc__
        test.__module__ = body.__module__
        return test

    return test_of


def gives(
    args: Sequence[Any], expected: Any, *scratch: Any, by: Any = None, **options: Any
) -> Any:
    """Makes a test of the body of a kernel: what it gives everywhere.

    Args:
      args: its arguments.
      expected: its results, or a function of the arguments.
      scratch, options: those of `run`, or of `by` and `check`.
      by: what makes the kernel of a body, if not `kernel`.
    """

    def check_body(body):
        wanted = expected(*args) if callable(expected) else expected
        if by is None:
            run(body, args, wanted, *scratch, **options)
            return
        of_check = {k: v for k, v in options.items() if k in OF_CHECK}
        rest = {k: v for k, v in options.items() if k not in OF_CHECK}
        check(by(body, *scratch, **rest), args, wanted, **of_check)

    return tests(check_body)


def in_place(
    body: Callable[..., None], out: Any = (), *scratch: Any, **options: Any
) -> Callable[[Any], Callable[..., Any]]:
    """As `kernel`, for one that updates its first argument, its first result."""
    make = kernel(body, out, *scratch, **options)

    def make_call(interpret=None):
        def call(state, *arguments):
            ref = jax.new_ref(state)
            results = jax.tree.leaves(make(interpret)(ref, *arguments))
            return (ref[...], *results) if results else ref[...]

        return call

    return make_call
