# SPDX-License-Identifier: Apache-2.0
"""`explain`: says why the kernels that a function calls are slow, without a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from pallas_gpu import arch, errors, expect, findings, offline
from pallas_gpu.entry.call import CallParams
from pallas_gpu.explanation import accesses, loops, products, resources
from pallas_gpu.explanation.findings import SlowFinding
from pallas_gpu.explanation.model import Model
from pallas_gpu.explanation.report import Explanation, KernelExplanation
from pallas_gpu.lowering.machine import Build

_FINDERS: tuple[Callable[[Model], Iterator[SlowFinding]], ...] = (
    products.products,
    accesses.accesses,
    accesses.atomics,
    loops.loops,
    resources.spills,
    resources.occupancy,
)


@expect.arguments()
def explain(
    fn: Callable[..., Any], *, target: str | arch.Target = "sm_90a"
) -> Callable[..., Explanation]:
    """Returns a function that says why the kernels of `fn` are slow.

    Nothing is run. Each kernel is compiled for the target, and the cost model estimates
    what takes time: products that did not become wgmma, loads that nothing overlaps,
    spills, accesses that are not coalesced or have bank conflicts, conversions of
    layouts, too few CTAs on an SM, contended atomics. A hint is given where the model
    expects a gain.

    Issued by: the host.

    Args:
      fn: a function of arrays, jitted or not, that calls kernels.
      target: `"sm_90a"`, `"sm_100a"` or `"sm_103a"`, as in `offline.compile`.

    Returns:
      A function of `fn`'s arguments, of which only shapes and dtypes are used; its
      result is an `Explanation`. Where the packages for `offline.compile` are missing,
      it says nothing of registers and spills.

    Raises:
      ArgumentError, TargetError: an unknown target, or a function that calls no kernel.
      UnsupportedError: a kernel of another machine than a GPU.
      PallasGpuError: a kernel does not compile.

    Example:
      >>> print(plgpu.explain(f)(x, jax.ShapeDtypeStruct((64,), "int32")))
    """
    chosen = arch.target(target)

    def explained(*args: Any) -> Explanation:
        kernels = offline.kernels_called(fn, args, chosen)
        return Explanation(tuple(_explained(params, chosen) for params in kernels))

    return explained


def _explained(params: CallParams, target: arch.Target) -> KernelExplanation:
    offline.require_target(params, target)
    if not isinstance(target, arch.GpuTarget):
        raise errors.UnsupportedError(
            "explain: the cost model has no figures for this machine",
            expected="a target of an NVIDIA GPU",
            got=target.name,
        )
    with warnings.catch_warnings():
        # The findings say the same.
        warnings.simplefilter("ignore", errors.PerformanceWarning)
        model = Model.of(Build(params, target))
    raw = [each for finder in _FINDERS for each in finder(model)]
    seconds = model.seconds
    seconds += sum(each.lost_seconds for each in raw if not each.is_counted)
    found = [each.of_kernel(seconds) for each in raw]
    found.sort(key=lambda f: (not f.is_slow, -f.lost_seconds, -f.seconds))
    return KernelExplanation(
        params.name,
        target.name,
        findings.place(params.defined_at),
        seconds,
        model.estimate.bound,
        model.resident,
        model.occupancy,
        None if model.compiled is None else model.compiled.resources,
        tuple(found),
    )
