# SPDX-License-Identifier: Apache-2.0
"""The target that kernels are compiled for offline, while they are traced.

It is a part of JAX's cache keys: a function is traced again for another target.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax

from pallas_gpu import arch
from pallas_gpu.entry.scope import setting

_NAME = jax.make_user_context(None)
# That of the kernel whose body is being traced.
_OF_KERNEL: contextvars.ContextVar[arch.GpuTarget] = contextvars.ContextVar(
    "pallas_gpu_target"
)


def assumed_target() -> str | None:
    """Returns the target of the offline compilation in progress, if there is one."""
    return _NAME.value


@contextlib.contextmanager
def assuming(target: arch.Target) -> Iterator[None]:
    """Kernels that are traced inside are compiled offline for this target.

    Those of a machine without targets of its own in `arch` are traced as by default.
    """
    with (
        _NAME(target.name) if target.name in arch.TARGETS else contextlib.nullcontext()
    ):
        yield


def target_of(declared: str | None) -> arch.GpuTarget:
    """Returns the target of a kernel whose parameters declare one, or None."""
    return arch.target(declared or assumed_target() or arch.DEFAULT_TARGET)


def tracing_for(target: arch.GpuTarget) -> contextlib.AbstractContextManager[None]:
    """Sets the target of the kernel while its body is traced."""
    return setting(_OF_KERNEL, target)


def of_kernel() -> arch.GpuTarget:
    """Returns the target that the kernel is traced for.

    It may be launched on another one if its compiler parameters have none.
    """
    return _OF_KERNEL.get(arch.DEFAULT_TARGET)
