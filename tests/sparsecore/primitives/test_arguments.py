# SPDX-License-Identifier: Apache-2.0
"""Arguments of operations: wrong ones are refused by the functions themselves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_gpu import sparsecore as plsc
from tests.support.refusal import refused_by
from tests.support.sparsecore.tracing import trace

SCRATCH = [
    plsc.VMEM((2, 16), jnp.float32),
    plsc.VMEM((32,), jnp.bfloat16),
    plsc.SMEM((2,), jnp.int32),
    plsc.SMEM((2,), jnp.float32),
    plsc.SemaphoreType.REGULAR((2,)),
    plsc.SemaphoreType.DMA,
]
INTERLEAVED = plsc.PackFormat.INTERLEAVED


def _lanes() -> jax.Array:
    return lax.iota(jnp.int32, 16)


def _floats() -> jax.Array:
    return jnp.zeros(16)


MISTAKES = {
    "one index": lambda v, *_: plsc.load_gather(v, [_lanes()]),
    "no list": lambda v, *_: plsc.load_gather(v, _lanes()),
    "float indices": lambda v, *_: plsc.load_gather(v, [_floats(), _floats()]),
    "sizes of indices": lambda v, *_: plsc.load_gather(v, [_lanes(), _lanes()[:8]]),
    "narrow elements": lambda _, b, *__: plsc.load_gather(b, [_lanes()]),
    "smem": lambda _, __, s, *___: plsc.load_gather(s, [_lanes()]),
    "a mask of ints": lambda v, *_: plsc.load_gather(
        v, [_lanes(), _lanes()], mask=_lanes()
    ),
    "another value": lambda v, *_: plsc.store_scatter(
        v, [_lanes(), _lanes()], _lanes()
    ),
    "another shape": lambda v, *_: plsc.store_compressed(
        v.at[0], _floats()[:8], mask=_floats() > 0
    ),
    "no vector": lambda *_: plsc.cumsum(jnp.float32(1)),
    "a scan of bf16": lambda _, b, *__: plsc.cumsum(b[...]),
    "a sort of another size": lambda *_: plsc.sort_key_val(_floats(), _floats()[:8]),
    "a count of floats": lambda *_: plsc.all_reduce_ffs(_floats()),
    "a reduction by 3": lambda *_: plsc.all_reduce_ffs(_floats() > 0, reduce=3),
    "a pack of bf16": lambda _, b, *__: plsc.pack(b[...], b[...], format=INTERLEAVED),
    "a format by name": lambda *_: plsc.pack(_floats(), _floats(), format="a"),
    "an unpack of a matrix": lambda *_: plsc.unpack(
        jnp.zeros((2, 16), jnp.bfloat16), format=INTERLEAVED
    ),
    "a bitcast of a scalar": lambda *_: plsc.bitcast(jnp.float32(1), jnp.int16),
    "an add in smem": lambda _, __, s, *___: plsc.addupdate(s, _floats()),
    "a counter of floats": lambda *r: plsc.fetch_and_add(r[3].at[0], 1, subcore_id=0),
    "two counters": lambda *r: plsc.fetch_and_add(r[2], 1, subcore_id=0),
    "a counter in vmem": lambda v, *_: plsc.fetch_and_add(v, 1, subcore_id=0),
    "two semaphores": lambda *r: plsc.semaphore_signal(r[4]),
    "a semaphore of copies": lambda *r: plsc.semaphore_wait(r[5]),
    "no semaphore": lambda v, *_: plsc.semaphore_read(v),
    "a wait that keeps": lambda *r: plsc.semaphore_wait(r[4].at[0], decrement=False),
    "a carried reference": lambda v, *_: plsc.parallel_loop(0, 4, carry=v)(print),
    "another carry": lambda *_: plsc.parallel_loop(0, 4, carry=1.0)(lambda i, c: i),
    "a result without carry": lambda *_: plsc.parallel_loop(0, 4)(lambda i: i),
    "two trees": lambda v, *_: plsc.sync_copy([v], v),
    "no reference": lambda v, *_: plsc.sync_copy(_floats(), v),
    "no declaration": lambda *_: plsc.run_scoped(print, jnp.float32),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@refused_by(trace, scratch_types=SCRATCH)
def test_arguments(x, o, *scratch, mistake):
    MISTAKES[mistake](*scratch)
