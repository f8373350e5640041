# SPDX-License-Identifier: Apache-2.0
"""The chip that kernels are traced for."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

from pallas_gpu import expect
from pallas_gpu.arch import tpu

# JAX's caches have it in their keys: a function is traced again for another chip.
_CHIP = jax.make_user_context(None)
# What JAX calls the devices of chips with SparseCores.
_KINDS = {"TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseCoreInfo:
    """The SparseCores of a chip.

    Attributes:
      num_cores: SparseCores of a device.
      num_subcores: vector subcores of each.
      num_lanes: elements of 32 bits of a vector register.
    """

    num_cores: int
    num_subcores: int
    num_lanes: int


def current() -> tpu.TpuTarget:
    """Returns the chip: that of `tracing_for`, the attached one, or the default."""
    if _CHIP.value is not None:
        return tpu.target(_CHIP.value)
    if jax.default_backend() == "tpu":
        kind = jax.devices()[0].device_kind
        return tpu.target(_KINDS.get(kind, kind))
    return tpu.DEFAULT_TARGET


@contextlib.contextmanager
def tracing_for(target: tpu.TpuTarget | str | None) -> Iterator[None]:
    """Kernels inside are traced for this chip; None changes nothing."""
    if target is None:
        yield
        return
    with _CHIP(tpu.target(target).name):
        yield


@expect.arguments(target=expect.anything)
def get_sparse_core_info(target: str | None = None) -> SparseCoreInfo:
    """Returns the numbers of cores, subcores and lanes of a chip.

    Args:
      target: `v5p`, `v6e` or `tpu7x`; None: the chip of the kernel that is traced, or
        of the attached TPU, or else tpu7x.

    Raises:
      TargetError: the chip is unknown, or has no SparseCores.
    """
    chip = current() if target is None else tpu.target(target)
    return SparseCoreInfo(
        num_cores=chip.cores, num_subcores=chip.subcores, num_lanes=chip.lanes
    )
