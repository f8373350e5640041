# SPDX-License-Identifier: Apache-2.0
"""`rank`: configurations of a function in the order of the cost model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from pallas_gpu import arch, expect
from pallas_gpu.testing import cost
from pallas_gpu.testing.cost import Estimate
from pallas_gpu.testing.tuning import compile
from pallas_gpu.testing.tuning.arguments import Call, listed, text_of
from pallas_gpu.testing.tuning.candidates import Candidate


@expect.arguments(configs=listed)
def rank(
    f: Callable[..., Any],
    configs: Sequence[Any],
    *args: Any,
    target: str | arch.Target = "sm_90a",
) -> list[Estimate]:
    """Ranks configurations of a function by the cost model, without a GPU.

    Since: any target. Issued by: the host.

    The function is traced with each configuration and the memory of its kernels is
    planned; nothing is compiled or run. The estimate is a roofline: the tensor core,
    copies, SMEM and arithmetic of an SM, waves of CTAs, and the L2, the memory and the
    power of the target's card.

    Args:
      f: a function of `args` and `config=` that calls kernels.
      configs: the configurations.
      *args: arrays or `jax.ShapeDtypeStruct`s, and other arguments.
      target: `"sm_90a"`, `"sm_100a"` or `"sm_103a"`.

    Returns:
      An estimate for each configuration, the fastest first; those that do not trace or
      do not fit the target are last, with the reason.

    Raises:
      TargetError: the target is unknown.

    Example:
      >>> best = plgpu.testing.rank(matmul, configs, a, b)[0].config
    """
    chosen = arch.target(target)
    call = Call.of(f, args, {})
    found = []
    for number, config in enumerate(configs):
        candidate = Candidate(number, config, text_of(config))
        compile.trace(candidate, call, chosen)
        if not candidate.is_left:
            found.append(Estimate(config, math.inf, reason=candidate.reason))
        else:
            found.append(cost.of_kernels(candidate.builds, config))
    return sorted(found, key=lambda e: e.seconds)
