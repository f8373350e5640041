# SPDX-License-Identifier: Apache-2.0
"""Operations of which an emitter is the rule: nothing is to be decided."""

from collections.abc import Callable
from typing import Any

from pallas_gpu.emitters import mbarrier, tma
from pallas_gpu.emitters.copies import cp_async
from pallas_gpu.emitters.copies.prefetch import prefetch
from pallas_gpu.emitters.grids import griddepcontrol, scheduling
from pallas_gpu.emitters.module import KernelBuilder
from pallas_gpu.emitters.sync.delay import delay
from pallas_gpu.emitters.tensor_cores import (
    operand_copy,
    scales,
    sparsity,
    tcgen05,
    tmem,
    wgmma,
)
from pallas_gpu.lowering.inference.arrays import COPIED
from pallas_gpu.lowering.rules import emitted_by
from pallas_gpu.primitives._registry import PRIMITIVES


def _sync(builder: KernelBuilder) -> None:
    builder.sync_cluster()


# From the name of a primitive: its emitters, in their order.
_EMITTERS: dict[str, tuple[Callable[..., None], ...]] = {
    "async_copy_scales_to_tmem": (scales.copy_to_tmem,),
    "async_copy_smem_to_tmem": (operand_copy.copy_to_tmem,),
    "async_copy_sparse_metadata_to_tmem": (sparsity.copy_to_tmem,),
    "async_prefetch": (prefetch,),
    "barrier_expect": (mbarrier.expect_tx,),
    "cluster_sync": (_sync,),
    "commit_gmem": (tma.fence_proxy_async_global, mbarrier.synchronize),
    "commit_smem": (tma.fence_proxy_async, mbarrier.synchronize),
    "commit_smem_to_gmem_group": (tma.commit_group,),
    "commit_tmem": (tmem.wait_stores,),
    "delay": (delay,),
    # What follows synchronizes the threads before it signals to others.
    "fence_smem": (tma.fence_proxy_async,),
    "griddepcontrol_launch_dependents": (griddepcontrol.launch_dependents,),
    "griddepcontrol_wait": (griddepcontrol.wait,),
    "publish_position": (scheduling.publish,),
    "set_max_registers": (wgmma.set_max_registers,),
    "tcgen05_commit_arrive": (tcgen05.commit_arrive,),
    "wait_gmem_to_smem": (cp_async.wait_group,),
    "wait_load_tmem": (tmem.wait_loads,),
    "wait_smem_to_gmem": (tma.wait_group,),
}
# How they use arrays in memory; scales and metadata are contiguous bytes.
_USES: dict[str, dict[str, Any]] = {
    "async_copy_scales_to_tmem": {"smem": "pointer", "tmem": "mma"},
    "async_copy_smem_to_tmem": {"smem": ("mma", COPIED), "tmem": "mma"},
    "async_copy_sparse_metadata_to_tmem": {"smem": "pointer", "tmem": "mma"},
    "async_prefetch": {"ref": None},
    "publish_position": {"dst": "store"},
}

for _name, _emitters in _EMITTERS.items():
    emitted_by(PRIMITIVES[_name].primitive, *_emitters, **_USES.get(_name, {}))
