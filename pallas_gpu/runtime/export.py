# SPDX-License-Identifier: Apache-2.0
"""What upstream has beside kernels: MLIR of functions, their cost, checks."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from pallas_gpu import _jax, errors, expect, types
from pallas_gpu.entry import scope
from pallas_gpu.types import values

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@expect.arguments(args=values.operands)
def estimate_cost(
    fun: Callable[..., Any], *args: Any, **kwargs: Any
) -> types.CostEstimate:
    """Estimates what a function of arrays costs, as a hint for `cost_estimate`.

    The operations are those that XLA counts before it optimizes; the bytes are those of
    the arguments and the results.

    Issued by: the host.

    Args:
      fun: the function. A kernel that it calls counts as no operations.
      args: its arguments: arrays, or types such as `jax.ShapeDtypeStruct`.
      kwargs: its keyword arguments, which are static.

    Returns:
      A `CostEstimate`.

    Raises:
      ArgumentTypeError: `fun` is not a function.

    Example:
      >>> plgpu.estimate_cost(lambda x: x @ x, jnp.ones((64, 64)))
      CostEstimate(flops=524288, transcendentals=0, bytes_accessed=32768, \
remote_bytes_transferred=0)
    """
    called = functools.partial(scope.call, "estimate_cost", fun, **kwargs)
    lowered = jax.jit(called).lower(*args)
    counts: Any = lowered.cost_analysis() or {}
    arrays = jax.tree.leaves((lowered.in_avals, lowered.out_info))
    return types.CostEstimate(
        flops=int(counts.get("flops", 0)),
        transcendentals=int(counts.get("transcendentals", 0)),
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
    )


@expect.arguments(args=values.operands, kwargs=values.operands)
def lower_as_mlir(
    f: Callable[..., Any],
    *args: Any,
    dynamic_shapes: bool = False,
    device: Any = None,
    static_argnames: str | Sequence[str] = (),
    platforms: Sequence[str] | None = None,
    **kwargs: Any,
) -> str:
    """Returns the text of the module that JAX exports for a function with kernels.

    A kernel is a custom call in it; `plgpu.offline.lower` has the module of a kernel.

    Issued by: the host.

    Args:
      f: the function.
      args: its arguments: arrays, or types such as `jax.ShapeDtypeStruct`.
      dynamic_shapes: False: shapes of kernels are static.
      device: None: the function is for any device of the platforms.
      static_argnames: names of arguments that are not traced.
      platforms: for which it is exported; None is CUDA alone.
      kwargs: its keyword arguments.

    Returns:
      The text.

    Raises:
      ArgumentTypeError: `f` is not a function.
      ArgumentError: a name that is not one of an argument, or of a platform.
      UnsupportedError: dynamic shapes, or a device.

    Example:
      >>> text = plgpu.lower_as_mlir(kernel, jnp.ones((64, 128)))
    """
    if device is not None:
        raise errors.UnsupportedError(
            "lower_as_mlir: a module for one device",
            expected="device=None",
            got=expect.shown(device),
            hint="name its platform: platforms=('cuda',)",
        )
    parameters = inspect.signature(f).parameters
    _require_some("static_argnames", static_argnames, parameters)
    _require_some("platforms", platforms or (), _PLATFORMS)
    with pallas_export_experimental(dynamic_shapes):
        called = functools.wraps(f)(functools.partial(scope.call, "lower_as_mlir", f))
        jitted = jax.jit(called, static_argnames=static_argnames)
        export = jax.export.export(jitted, platforms=platforms or ("cuda",))
        return export(*args, **kwargs).mlir_module()


def _require_some(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise errors.ArgumentError(
            f"lower_as_mlir: {what} has a name that means nothing",
            expected=f"some of {list(known)}",
            got=unknown[0],
            hint="correct the name, or leave it out",
        )


@expect.arguments()
def pallas_export_experimental(
    dynamic_shapes: bool,
) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager for `jax.export`, which needs none for kernels.

    Issued by: the host.

    Args:
      dynamic_shapes: False: shapes of kernels are static.

    Raises:
      UnsupportedError: dynamic shapes.

    Example:
      >>> with plgpu.pallas_export_experimental(False):
      ...     exported = jax.export.export(jax.jit(f), platforms=["cuda"])(x)
    """
    if dynamic_shapes:
        raise errors.UnsupportedError(
            "a kernel is exported with dynamic shapes",
            expected="dynamic_shapes=False",
            got=dynamic_shapes,
            hint="export the function for each shape",
        )
    return contextlib.nullcontext()


@expect.arguments()
def enable_debug_checks(new_val: bool) -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager: kernels that are called in it contain their checks.

    `jax.config.update("jax_pallas_enable_debug_checks", True)` does so for all kernels,
    `CompilerParams(debug_checks=True)` for one. The emulator always checks.

    Issued by: the host.

    Args:
      new_val: whether `debug_check` is compiled; False leaves it to the parameters of
        the kernel.

    Raises:
      ArgumentTypeError: not a bool.

    Example:
      >>> with plgpu.enable_debug_checks(True):
      ...     kernel(x)
    """
    return _jax.enable_debug_checks(new_val)
