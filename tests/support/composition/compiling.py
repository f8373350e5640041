# SPDX-License-Identifier: Apache-2.0
"""Programs with kernels that are compiled ahead of time, exported or cached."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from pallas_gpu import arch, errors
from pallas_gpu.runtime import target_config
from tests.support.composition.row import SHARDED, VECTOR, Refused, Row, Way, X


def shapes(way: Way) -> None:
    f = way.make()
    result = jax.eval_shape(jax.jit(f) if way.jit else f, X)
    assert (result.shape, result.dtype) == (X.shape, X.dtype)


def ahead_of_time(way: Way) -> None:
    compiled = _jitted(way).lower(X).compile()
    np.testing.assert_array_equal(compiled(X), 2 * X)


def for_a_topology(way: Way, *axes: str, devices: int = 1) -> None:
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="explicit",
        topology=f"1x1x{devices}",
        target_config=target_config.target_config(arch.SM_90A),
    )
    mesh = jax.sharding.Mesh(np.array(topology.devices), ("d",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P(*axes))
    x = jax.ShapeDtypeStruct(VECTOR.shape, VECTOR.dtype, sharding=sharding)
    compiled = _jitted(way).lower(x).compile()
    assert "mosaic_gpu_v2" in compiled.as_text()


def export_for_cpu(way: Way) -> None:
    jax.export.export(_jitted(way))(X)


def export_for_gpus(way: Way) -> None:
    exported = jax.export.export(_jitted(way), platforms=["cuda"])(X)
    assert "mosaic_gpu_v2" in exported.mlir_module()
    if importlib.util.find_spec("flatbuffers"):
        read = jax.export.deserialize(exported.serialize())
        assert read.mlir_module() == exported.mlir_module()
        exported = read
    again = jax.jit(exported.call).trace(X).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu_v2" in again.as_text()


_CACHED = """
import jax, sys
from tests.support.composition.row import Way, X
hits = []
def listen(event, **_):
    if "compilation_cache/cache_" in event:
        hits.append(event.rpartition("/")[2])
jax.monitoring.register_event_listener(listen)
k = Way({entry!r}, True).make()
jax.numpy.asarray(jax.jit(lambda x: k(x) + 1)(X))
print(hits[0])
"""


def cached(way: Way) -> None:
    """The second process finds what the first one has compiled."""
    if not way.jit:
        _require_compilation(way)
    with tempfile.TemporaryDirectory() as folder:
        code = _CACHED.format(entry=way.entry)
        environment = {
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        found = [
            subprocess.run(
                [sys.executable, "-c", code], env=environment, check=True,
                capture_output=True, text=True,
            ).stdout.split()[-1]
            for _ in range(2)
        ]  # fmt: skip
    assert found == ["cache_misses", "cache_hits"]


class NotCompiledError(Exception):
    """There is nothing to keep in a cache."""


def _require_compilation(way: Way) -> None:
    compiled: list[str] = []

    def listen(event: str, _: float, **__: Any) -> None:
        compiled.append(event)

    # The first call of a process compiles JAX's own conversions of the arguments.
    way.make()(X)
    jax.monitoring.register_event_duration_secs_listener(listen)
    way.make()(X)
    if not any("backend_compile" in event for event in compiled):
        raise NotCompiledError("nothing was compiled")


def _jitted(way: Way) -> Any:
    return jax.jit(way.make()) if way.jit else way.make()


_JITTED_ONLY = {
    "eager": Refused(
        AttributeError,
        "a kernel has no attribute 'lower'",
        "JAX compiles what `jax.jit` returns",
    )
}
_EMULATOR = Refused(
    errors.UnsupportedError,
    "the emulator cannot be exported",
    "the emulator is a Python callback, which cannot be serialized; "
    '`platforms=["cuda"]` exports the compiled kernel, with no GPU present',
)
_INTERPRETED = Refused(
    NotCompiledError, "nothing was compiled", "an eager call in the emulator"
)
_EXPORT = Refused(
    ValueError, "Function to be exported must be the result of `jit`", "JAX's rule"
)

ROWS = (
    Row("`eval_shape`", shapes),
    Row("`lower().compile()`", ahead_of_time, _JITTED_ONLY),
    Row(
        "`lower().compile()` for a GPU topology, without a GPU",
        for_a_topology, _JITTED_ONLY, offline=True,
    ),
    Row(
        "that for two GPUs which have the arguments whole",
        lambda way: for_a_topology(way, devices=2), _JITTED_ONLY, offline=True,
    ),
    Row(
        "that for two GPUs over which the arguments are sharded",
        lambda way: for_a_topology(way, "d", devices=2),
        {**_JITTED_ONLY, "jit": SHARDED}, offline=True,
    ),
    Row("`jax.export` on a CPU", export_for_cpu, {"eager": _EXPORT, "jit": _EMULATOR}),
    Row(
        "`jax.export` for CUDA and back, without a GPU",
        export_for_gpus, {"eager": _EXPORT},
    ),
    Row(
        "a hit in JAX's persistent compilation cache, in another process",
        cached, {"eager": _INTERPRETED},
    ),
)  # fmt: skip
