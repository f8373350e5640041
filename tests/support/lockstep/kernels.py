# SPDX-License-Identifier: Apache-2.0
"""A kernel's lowered module, run on the CPU for 128 threads in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from pallas_gpu import arch, compiler
from pallas_gpu.entry import call
from tests.support.lockstep import machine as lockstep
from tests.support.semantics import Warpgroup, under


def run(
    fn: Callable[..., Any], args: Sequence[Any], semantics: Any = Warpgroup
) -> list[np.ndarray]:
    """Returns the results of a function that calls one kernel with its arguments."""
    jaxpr = jax.make_jaxpr(under(semantics, fn))(*args).jaxpr
    (params,) = (call.CallParams(**eqn.params) for eqn in _kernels(jaxpr))
    lowered = compiler.lower(params, arch.target("sm_90a"))
    arrays = [np.asarray(x) for x in args]
    return lockstep.run_module(lowered.module, arrays, params.out_avals)


def _kernels(jaxpr: Any) -> list[Any]:
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is call.kernel_p:
            found.append(eqn)
        for value in eqn.params.values():
            if isinstance(value, core.ClosedJaxpr) and eqn not in found:
                found += _kernels(value.jaxpr)
    return found
