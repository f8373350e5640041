# SPDX-License-Identifier: Apache-2.0
"""Effects of the arguments of `pallas_call`, and of what describes its blocks.

Rows of the table of tests/public/test_effects.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import pallas_gpu as plgpu
from tests.support import effects as see
from tests.support import public_calls as calls
from tests.support.public_calls import F32, OUT, SHAPE, SPEC

TILE, SMALL_TILE = plgpu.SMEM(SHAPE, F32), plgpu.SMEM((8, 128), F32)
EMIT = "tests/pipeline/test_emit_pipeline.py"
SEVERAL = "tests/pipeline/test_num_threads.py"
SPECIALIZED = "tests/pipeline/test_warp_specialized.py"
P = functools.partial(plgpu.pallas_call, see.exp, OUT)


def block(*shape: int, **fields: Any) -> plgpu.BlockSpec:
    """A block spec whose index map counts the first dimension."""
    return plgpu.BlockSpec(shape, lambda i: (i, 0), **fields)


def over_the_edge(mode: plgpu.OOBFillMode) -> str:
    """A block over the array's edge, in the emulator."""
    spec = block(48, 128, oob_fill_mode=mode)
    params = plgpu.InterpretParams(partial_results=True)
    k = plgpu.pallas_call(
        calls.nothing, OUT, grid=2, in_specs=[spec], out_specs=see.WHOLE,
        interpret=params,
    )  # fmt: skip
    return see.outcome(lambda: k(jnp.ones(SHAPE, F32)).shape)


EFFECTS: dict[str, str | Callable[[], Any]] = {
    "pallas_call.grid_spec": lambda: see.grid_specs({"grid": 1}, {"grid": 2}),
    "pallas_call.grid": lambda: see.block_calls({"grid": 1}, {"grid": 2}),
    "pallas_call.in_specs": lambda: see.specs(SPEC, block(16, 128)),
    "pallas_call.out_specs": lambda: see.block_calls(
        *({"grid": 2, "out_specs": spec} for spec in (SPEC, block(16, 128)))
    ),
    "pallas_call.scratch_shapes": lambda: see.block_calls(
        *({"scratch_shapes": [t]} for t in (TILE, SMALL_TILE)), body=lambda *_: None
    ),
    "pallas_call.input_output_aliases": "tests/pipeline/test_aliases.py::"
    "test_what_the_body_does_not_store_keeps_its_value",
    "pallas_call.num_threads": f"{SEVERAL}::"
    "test_without_a_sequential_axis_no_warpgroup_is_added",
    "pallas_call.thread_name": f"{SEVERAL}::"
    "test_all_warpgroups_run_the_body_at_each_step",
    "pallas_call.debug": lambda: see.printed(P),
    "pallas_call.interpret": lambda: see.interpreted(P),
    "pallas_call.name": lambda: see.block_calls({"name": "a"}, {"name": "b"}),
    "pallas_call.compiler_params": lambda: see.block_calls(
        {}, see.params(approx_math=True), body=see.exp
    ),
    "BlockSpec.block_shape": lambda: see.specs(block(8, 128), block(16, 128)),
    "BlockSpec.index_map": lambda: see.specs(plgpu.BlockSpec((8, 128)), SPEC),
    "BlockSpec.transforms": lambda: see.specs(
        SPEC, block(8, 128, transforms=(plgpu.TilingTransform((8, 32)),))
    ),
    "BlockSpec.delay_release": f"{EMIT}::"
    "test_delay_release_keeps_a_buffer_for_products_in_flight",
    "BlockSpec.collective_axes": f"{SPECIALIZED}::"
    "test_a_cluster_shares_a_block_by_multicast",
    "BlockSpec.oob_fill_mode": lambda: [
        over_the_edge(plgpu.OOBFillMode.ZEROS),
        over_the_edge(plgpu.OOBFillMode.PROMISE_IN_BOUNDS),
    ],
    "BlockSpec.memory_space": lambda: see.specs(
        SPEC, block(8, 128, memory_space=plgpu.GMEM)
    ),
    "GridSpec.grid": lambda: see.grid_specs({"grid": 1}, {"grid": 8}),
    "GridSpec.in_specs": lambda: see.grid_specs(
        {"grid": 8}, {"grid": 8, "in_specs": [SPEC]}
    ),
    "GridSpec.out_specs": lambda: see.grid_specs(
        {"grid": 8}, {"grid": 8, "out_specs": SPEC}
    ),
    "GridSpec.scratch_shapes": lambda: see.grid_specs(
        {}, {"scratch_shapes": [plgpu.Barrier()]}
    ),
    **{
        f"PrefetchScalarGridSpec.{field}": "tests/pipeline/test_scalar_prefetch.py"
        for field in ("grid", "in_specs", "out_specs", "scratch_shapes")
    },
    "Element.padding": "tests/pipeline/test_block_kinds.py",
}
