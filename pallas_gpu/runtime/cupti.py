# SPDX-License-Identifier: Apache-2.0
"""Times of kernels on the device, which CUPTI records for JAX's CUDA plugin."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax

from pallas_gpu import errors

# The plugin of the newer CUDA first, as in `environment`; jaxlib's own is of builds
# from source.
_MODULES = (
    "jax_cuda13_plugin._mosaic_gpu_ext",
    "jax_cuda12_plugin._mosaic_gpu_ext",
    "jaxlib.mosaic.gpu._mosaic_gpu_ext",
)


def kernel_times(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """Returns the name and the milliseconds of each kernel that `run` launches.

    The kernels are in the order of their launches. The results of `run` are awaited.

    Raises:
      NoGpuError: JAX has no CUDA device.
      UnsupportedError: the CUDA plugin cannot record times.
    """
    require_gpu()
    cupti = _extension()
    try:
        cupti._cupti_init()
    except RuntimeError as error:
        raise errors.UnsupportedError(
            "CUPTI does not record the times of kernels",
            expected="no other profiler in this process",
            got=str(error).splitlines()[0] if str(error) else repr(error),
            hint="end the other profiler, or pass another timer",
        ) from error
    try:
        jax.block_until_ready(run())
    finally:
        times = cupti._cupti_get_timings(False)
    return [(str(name), float(milliseconds)) for name, milliseconds in times]


def first_gpu() -> Any:
    """Returns the first GPU, JAX's default device or not; None without one."""
    try:
        return jax.devices("cuda")[0]
    except RuntimeError:
        return None


def require_gpu() -> None:
    """Raises NoGpuError if JAX has no CUDA device."""
    if first_gpu() is None:
        raise errors.NoGpuError(
            "times of kernels are measured on a GPU, and JAX has none",
            expected="a CUDA device",
            got=f"JAX's default backend {jax.default_backend()!r}",
            hint="pass a timer of another clock, or rank configurations without a GPU",
        )


@functools.cache
def _extension() -> ModuleType:
    for name in _MODULES:
        try:
            found = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(found, "_cupti_get_timings"):
            return found
    raise errors.UnsupportedError(
        "the CUDA plugin has no access to CUPTI",
        expected=" or ".join(_MODULES),
        got="none of them, or without _cupti_get_timings",
        hint="install the extra cuda13 with matching versions of jax and the plugin",
    )
