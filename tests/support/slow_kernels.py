# SPDX-License-Identifier: Apache-2.0
"""Kernels that are slow for one reason each, as people wrote them, and their causes.

A case names the line by a comment `# slow` in its body.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu

F32, BF16 = jnp.float32, jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Slow:
    """A slow kernel.

    Attributes:
      kind: of the finding.
      make: returns the kernel.
      body: has the line.
      shapes: of the arguments.
      facts: of the finding.
    """

    kind: str
    make: Callable[[], Any]
    body: Callable[..., Any]
    shapes: tuple[Any, ...]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def line(self) -> int:
        """The line of the cause."""
        lines, first = inspect.getsourcelines(self.body)
        (at,) = [i for i, text in enumerate(lines) if "# slow" in text]
        return first + at


def _array(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# A product whose right operand is a value that two warpgroups multiply by: with too
# little SMEM for a copy each.
def shared_value(x, w, o, room):
    mine = plgpu.ds(jax.lax.axis_index("wg") * 64, 64)

    @plgpu.loop(0, 64, init_carry=jnp.zeros((64, 128), F32))
    def total(i, acc):
        scaled = (w[...].astype(F32) * i).astype(BF16)
        return acc + jnp.dot(x[mine], scaled, preferred_element_type=F32)  # slow

    o[mine] = total


def _shared_value():
    return plgpu.kernel(
        shared_value,
        out_type=_array(128, 128),
        scratch_types=[plgpu.SMEM((53000,), F32)],
        num_threads=2,
        thread_name="wg",
    )


# Sparse attention's way to its blocks: indices come from an array.
def gathered(x, indices, o, *, num_stages=1):
    zeros = jnp.zeros((64, 64), F32)

    @plgpu.loop(0, 64, init_carry=zeros, num_stages=num_stages)
    def acc(i, acc):
        block = x[indices[i]]  # slow
        return acc + jnp.dot(block, block.T, preferred_element_type=F32)

    o[...] = acc


def _gathered(**options):
    body = functools.partial(gathered, **options)
    return plgpu.kernel(body, out_type=_array(64, 64))


def gathered_ahead():
    """The kernel of loads at computed indices as its finding says to write it."""
    return _gathered(num_stages=3)


def spilling(x, o):
    def step(i, acc):
        return acc * x[i] + jnp.exp(acc) * x[i + 1] + jnp.sqrt(acc)  # slow

    o[...] = jax.lax.fori_loop(0, 64, step, jnp.zeros((64, 320), F32))


def _spilling():
    return plgpu.kernel(spilling, out_type=_array(64, 320))


def by_columns(x, o):
    mine = plgpu.ds(jax.lax.axis_index("i") * 1, 1)
    o[mine] = x[:, mine].T * 2.0  # slow


def _by_columns():
    return plgpu.kernel(
        by_columns, out_type=_array(1024, 4096), grid=(1024,), grid_names=("i",)
    )


def columns_of_tile(x, o, tile):
    tile[...] = x[...]

    @plgpu.loop(0, 32, init_carry=jnp.zeros((128,), F32))
    def total(i, acc):
        return acc * 0.5 + tile[:, i]  # slow

    o[...] = total


def _columns_of_tile():
    return plgpu.kernel(
        columns_of_tile,
        out_type=_array(128),
        scratch_types=[plgpu.SMEM((128, 32), F32)],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )


def converting(x, o, tile):
    tile[...] = x[...]

    @plgpu.loop(0, 64, init_carry=jnp.zeros((64, 64), F32))
    def total(i, acc):
        return acc * 0.5 + jnp.exp(acc.T)  # slow

    o[...] = total


def _converting():
    tile = plgpu.SMEM((64, 64), F32)
    return plgpu.kernel(converting, out_type=_array(64, 64), scratch_types=[tile])


def of_48_rows(x, w, o):
    def step(i, acc):
        return acc + jnp.dot(x[i], w[i], preferred_element_type=F32)  # slow

    o[...] = jax.lax.fori_loop(0, 64, step, jnp.zeros((48, 128), F32))


def _of_48_rows():
    def load(refs_x, refs_w, o, x, w, barrier):
        plgpu.copy_gmem_to_smem(refs_x, x, barrier)
        plgpu.copy_gmem_to_smem(refs_w, w, barrier)
        plgpu.barrier_wait(barrier)
        of_48_rows(x, w, o)

    return plgpu.kernel(
        load,
        out_type=_array(48, 128),
        scratch_types=[
            plgpu.SMEM((4, 48, 64), BF16),
            plgpu.SMEM((4, 64, 128), BF16),
            plgpu.Barrier(num_arrivals=2),
        ],
    )


def lonely(x, o, room):  # slow
    mine = plgpu.ds(jax.lax.axis_index("i") * 8, 8)

    @plgpu.loop(0, 16)
    def _(j):
        part = plgpu.ds(j * 128, 128)
        o[mine, part] = x[mine, part] * 2.0


def _lonely():
    return plgpu.kernel(
        lonely,
        out_type=_array(32768, 2048),
        grid=(4096,),
        grid_names=("i",),
        scratch_types=[plgpu.SMEM((40000,), F32)],
    )


def one_buffer(x, o, tile, loaded):
    @plgpu.loop(0, 64, init_carry=jnp.zeros((64, 128), F32))
    def total(i, acc):
        plgpu.copy_gmem_to_smem(x.at[i], tile, loaded)  # slow
        plgpu.barrier_wait(loaded)
        return acc + jnp.exp(tile[...])

    o[...] = total


def _one_buffer():
    return plgpu.kernel(
        one_buffer,
        out_type=_array(64, 128),
        scratch_types=[plgpu.SMEM((64, 128), F32), plgpu.Barrier()],
    )


# Two warpgroups of a block multiply, and then both look for the least.
def in_turn(x, c, norms, o):  # slow
    rows = plgpu.ds(jax.lax.axis_index("wg") * 64, 64)
    dots = jnp.dot(x[rows], c[...].T, preferred_element_type=F32)
    o[0, rows] = (norms[...] - 2 * dots).argmin(1).astype(jnp.int32)


def _in_turn():
    return plgpu.pallas_call(
        in_turn,
        out_shape=_array(32, 131072, dtype=jnp.int32),
        grid=(1024, 32),
        in_specs=[
            plgpu.BlockSpec((128, 128), lambda i, j: (i, 0)),
            plgpu.BlockSpec((128, 128), lambda i, j: (j, 0)),
            plgpu.BlockSpec((128,), lambda i, j: (j,)),
        ],
        out_specs=plgpu.BlockSpec((1, 128), lambda i, j: (j, i)),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), max_concurrent_steps=2
        ),
    )


def counted(x, zeros, counts):
    bins = jnp.bincount(x[plgpu.program_id(0)], length=256).astype(jnp.int32)
    plgpu.atomic_add(counts, bins)  # slow


def _counted():
    def count(x):
        zeros, counts = jnp.zeros(256, jnp.int32), _array(256, dtype=jnp.int32)
        return plgpu.pallas_call(
            counted, out_shape=counts, grid=len(x), input_output_aliases={1: 0}
        )(x, zeros)

    return count


CASES = {
    "a value shared by warpgroups": Slow(
        "mma-sync",
        _shared_value,
        shared_value,
        (_array(128, 64, dtype=BF16), _array(64, 128, dtype=BF16)),
        {"instruction": "mma.sync"},
    ),
    "loads at computed indices": Slow(
        "unpipelined-loads",
        _gathered,
        gathered,
        (_array(512, 64, 64, dtype=BF16), _array(64, dtype=jnp.int32)),
        {"iterations": 64, "bytes_per_iteration": 64 * 64 * 2},
    ),
    "one buffer": Slow(
        "unpipelined-loads",
        _one_buffer,
        one_buffer,
        (_array(64, 64, 128),),
        {"slots": 1, "bytes_per_iteration": 64 * 128 * 4},
    ),
    "a spill in a loop": Slow(
        "spill", _spilling, spilling, (_array(65, 64, 320),), {"in_loop": True}
    ),
    "uncoalesced access": Slow(
        "uncoalesced",
        _by_columns,
        by_columns,
        (_array(4096, 1024),),
        {"sectors_per_request": 32, "ideal_sectors": 4},
    ),
    "bank conflicts": Slow(
        "bank-conflicts",
        _columns_of_tile,
        columns_of_tile,
        (_array(128, 32),),
        {"wavefronts_per_request": 32, "ideal_wavefronts": 1},
    ),
    "a conversion in a loop": Slow(
        "conversion", _converting, converting, (_array(64, 64),)
    ),
    "48 rows": Slow(
        "mma-sync",
        _of_48_rows,
        of_48_rows,
        (_array(4, 48, 64, dtype=BF16), _array(4, 64, 128, dtype=BF16)),
        {"m": 48, "n": 128, "k": 64},
    ),
    "one CTA of an SM": Slow(
        "occupancy",
        _lonely,
        lonely,
        (_array(32768, 2048),),
        {"limited_by": ["SMEM"], "ctas_per_sm": 1},
    ),
    "warpgroups in turn": Slow(
        "occupancy",
        _in_turn,
        in_turn,
        (_array(131072, 128, dtype=BF16), _array(4096, 128, dtype=BF16), _array(4096)),
        {"limited_by": ["registers"], "ctas_per_sm": 1},
    ),
    "atomics on one array": Slow(
        "contended-atomics",
        _counted,
        counted,
        (_array(4096, 512, dtype=jnp.int32),),
        {"bytes": 1024, "ctas": 4096},
    ),
}
