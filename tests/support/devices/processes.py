# SPDX-License-Identifier: Apache-2.0
"""One of two processes with a CPU device each, connected by `jax.distributed`.

`python -m tests.support.devices.processes PORT NUMBER` prints what has come of kernels
and collectives, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops import collectives

ROW = jax.ShapeDtypeStruct((1, 128), jnp.float32)


def stays(x, o):
    o[...] = x[...] * 2 + lax.axis_index("d").astype(jnp.float32)


def reaches(x, o):
    other = 1 - lax.axis_index("d")
    o[...] = plgpu.remote_ref(x, {"d": other})[...]


LOCAL: dict[str, Callable[..., Any]] = {
    "stays": plgpu.kernel(stays, ROW),
    "reaches": plgpu.kernel(reaches, ROW),
    "reaches as emitted code": plgpu.kernel(reaches, ROW, interpret="emitted"),
    "all_reduce": lambda x: collectives.all_reduce(x, "d"),
    "required kernel": lambda x: collectives.all_reduce(x, "d", method="one_shot"),
}


def main(port: str, number: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(number))
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("d",), axis_types=auto)
    place = jax.NamedSharding(mesh, jax.P("d"))
    whole = np.arange(256, dtype=np.float32).reshape(2, 128)
    x = jax.make_array_from_callback(whole.shape, place, lambda i: whole[i])
    found = {}
    for name, local in LOCAL.items():
        specs = {"in_specs": jax.P("d"), "out_specs": jax.P("d")}
        f = jax.jit(jax.shard_map(local, mesh=mesh, **specs))
        try:
            (own,) = f(x).addressable_shards
            found[name] = np.asarray(own.data)[0, :2].tolist()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
