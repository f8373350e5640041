# SPDX-License-Identifier: Apache-2.0
"""Kernels for SparseCores, and every way to run one body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_gpu import sparsecore as plsc
from pallas_gpu.sparsecore.runtime import offline_compiler
from tests.support import executions, tiers
from tests.support.sparsecore import emitted, interpreter
from tests.support.sparsecore.modules import CHIPS

# Of the module's interpreter: copies at once, as late as waits allow, and between.
_ORDERS = 3


def lanes() -> int:
    """The elements of a register of 32 bits, of the chip that is traced for."""
    return plsc.get_sparse_core_info().num_lanes


def part(i: Any) -> Any:
    """The elements of a register from a position on."""
    return plsc.ds(i, lanes())


def kernel(
    body: Callable[..., None],
    out: Any = (),
    *scratch: Any,
    cores: int = 1,
    subcores: int = 16,
    scalar: bool = False,
    target: str | None = None,
    tiling: str = "compact",
    **interpret: Any,
) -> Callable[..., Any]:
    """Returns a kernel of a body.

    Args:
      body: of the kernel; its axes are `c` and `s`.
      out: its results: their types, or arrays of these types.
      scratch: its scratch_types.
      cores, subcores: of its mesh.
      scalar: whether it runs on scalar subcores.
      target, tiling: of its compiler_params.
      interpret: parameters of the emulator.
    """
    mesh: Any
    if scalar:
        mesh = plsc.ScalarSubcoreMesh(axis_name="c", num_cores=cores)
    else:
        mesh = plsc.VectorSubcoreMesh(
            core_axis_name="c",
            subcore_axis_name="s",
            num_cores=cores,
            num_subcores=subcores,
        )
    return plsc.kernel(
        body,
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), out),
        mesh=mesh,
        scratch_types=scratch,
        compiler_params=plsc.CompilerParams(target=target, tiling=tiling),
        interpret=plsc.InterpretParams(**interpret),
    )


def emulate(
    body: Callable[..., None],
    args: Sequence[Any],
    out: Any = (),
    *scratch: Any,
    **options: Any,
) -> Any:
    """Runs a body in the emulator; see `kernel`."""
    return kernel(body, out, *scratch, **options)(*args)


def check(
    body: Callable[..., None],
    args: Sequence[Any],
    expected: Any,
    *scratch: Any,
    schedules: int = 6,
    rtol: float = 0.0,
    interpret: bool = True,
    chips: Sequence[str] = CHIPS,
    **options: Any,
) -> None:
    """Runs a body everywhere, and compares with what NumPy computes.

    That is the emulator under several schedules; its module, interpreted; and on the
    way to it the compilation for each chip, where libtpu is installed: what the
    emulator accepts, libtpu compiles. Tiers that do not run everything compile less.

    Args:
      body: of the kernel.
      args: its arguments.
      expected: its results, as NumPy computes them.
      scratch: its scratch_types.
      schedules: of the emulator; the tiers that do not run everything have fewer.
      rtol: relative tolerance.
      interpret: False where the module is not to be interpreted.
      chips: for which it is compiled.
      options: others of `kernel`.
    """
    if not tiers.runs_everything():
        schedules = min(schedules, 4)
    function = kernel(body, expected, *scratch, schedules=schedules, **options)
    _compare(function(*args), expected, rtol)
    function = kernel(body, expected, *scratch, **options)
    build = emitted.lowered(function, *args)
    for seed in range(_ORDERS if interpret else 0):
        made = interpreter.execute(build.module, *args, seed=seed)
        _compare(made, jax.tree.leaves(expected), rtol)
    if not offline_compiler.is_available():
        return
    # One chip for every third body, in the tiers that do not run everything.
    name = executions.test_name()
    chosen = tiers.one_of(name, [[tiers.one_of(name + "!", chips)], [], []])
    for chip in chips if tiers.runs_everything() else chosen:
        function = kernel(body, expected, *scratch, target=chip, **options)
        emitted.finished(emitted.lowered(function, *args, target=chip))


def _compare(got: Any, expected: Any, rtol: float) -> None:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype.kind == "i" and b.dtype.kind == "u":
            a = a.view(b.dtype)  # of a module, whose integers have no sign
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(
            a.astype(np.float64), b.astype(np.float64), rtol=rtol
        )
