# SPDX-License-Identifier: Apache-2.0
"""Kernels of several devices: what reaches others is upstream's, instruction by one."""

from __future__ import annotations

import collections
import functools
import importlib
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

if not jax.__version__.startswith("0.11."):
    pytest.skip("compares with upstream 0.11", allow_module_level=True)

from tests.support.differential import sides
from tests.support.installed_kernels import PLACE, ported

DEVICES = 4
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
# The instructions that act on other devices' memory, and those that order them.
REACHING = re.compile(
    r"(multimem|red\.|cp\.reduce|(st|ld)(\.global(\.nc)?)?\.v[24]\.b32|(st|ld)\.b32)"
    r"[\w.:]*"
)
# Upstream writes to its input so that XLA copies it to symmetric memory.
_TOUCH = "x_ref[(0,) * len(x_ref.shape)] = jnp.asarray(0, x_ref.dtype)"


def reaching(side: sides.Side, local, *args) -> collections.Counter[str]:
    """Counts the words that the instructions of a kernel access, by instruction."""
    device = sides._Device(sides.TARGET)
    mesh = jax.sharding.AbstractMesh(
        (DEVICES,), ("x",), (jax.sharding.AxisType.Auto,), abstract_device=device
    )
    f = jax.shard_map(
        local, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
    )
    counts: collections.Counter[str] = collections.Counter()
    # Behind what makes tensor maps of other devices' arrays: upstream's host does that.
    *_, body = side.ptx(f, *args).split("fence.proxy.tensormap::generic.acquire")
    for found in filter(None, map(REACHING.search, body.splitlines())):
        words = re.search(r"\.v([24])", found.group())
        # Upstream's addresses of other devices are generic ones, of unknown alignment.
        name = re.sub(r"\.v[24]|(?<=^[ls][td])\.global(\.nc)?", "", found.group())
        counts[name] += int(words[1]) if words else 1
    return counts


def alike(make, *args) -> collections.Counter[str]:
    """Returns the instructions of both sides, which have the same ones."""
    ours, theirs = (reaching(x, make(x.names), *args) for x in sides.both())
    assert ours == theirs
    return ours


# --- upstream's programs --------------------------------------------------------------


def both_modules(monkeypatch, name, *replaced):
    monkeypatch.setattr(jax, "device_count", lambda *_: DEVICES)
    monkeypatch.setattr(jax, "local_device_count", lambda *_: DEVICES)
    ours = ported(name, *replaced)
    # Upstream asks the first device for its number of SMs.
    gpu = SimpleNamespace(core_count=4, compute_capability="9.0", platform="gpu")
    monkeypatch.setattr(jax, "devices", lambda *_: [gpu] * DEVICES)
    return ours, importlib.import_module(f"{PLACE}.{name}")


PROGRAMS = {
    "all_gather_mgpu": ("all_gather", (_TOUCH, "pass")),
    "reduce_scatter_mgpu": ("reduce_scatter", ()),
}


@pytest.mark.offline
@pytest.mark.parametrize("name", PROGRAMS)
def test_multimem_programs(name, monkeypatch):
    called, replaced = PROGRAMS[name]
    modules = both_modules(monkeypatch, name, *replaced)
    ours, theirs = (
        reaching(
            side,
            functools.partial(getattr(module, called), axis_name="x", num_blocks=4),
            jax.ShapeDtypeStruct((64, 256), BF16),
        )
        for side, module in zip(sides.both(), modules, strict=True)
    )
    assert ours == theirs
    assert ours["multimem.red.release.sys.global.add.u32"] == 1


@pytest.mark.offline
def test_a_product_of_gathered_rows_signals_as_upstream(monkeypatch):
    modules = both_modules(monkeypatch, "collective_matmul_mgpu")
    signals = []
    for side, module in zip(sides.both(), modules, strict=True):
        config = module.TuningConfig(
            tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=4
        )
        call = functools.partial(
            module.all_gather_lhs_matmul, axis_name="x", config=config, dtype=F16
        )
        operands = [jax.ShapeDtypeStruct(s, F16) for s in ((128, 256), (256, 128))]
        found = reaching(side, call, *operands)
        signals.append(found["red.release.sys.global.add.u32"])
    assert signals == [2, 2]


# --- small kernels --------------------------------------------------------------------


def right():
    return lax.rem(lax.axis_index("x") + 1, jnp.int32(DEVICES))


def store(names, x, o, tile, sem):
    names.remote_ref(o, right())[...] = x[...]
    names.semaphore_signal(sem, device_id=right())


def load(names, x, o, tile, sem):
    o[...] = names.remote_ref(x, right())[...]


def reduce(names, x, o, tile, sem):
    names.copy_smem_to_gmem(tile, names.remote_ref(o, right()), reduction_op="add")
    names.wait_smem_to_gmem(0)


def signal_several(names, x, o, tile, sem):
    names.semaphore_signal_parallel(
        *(names.SemaphoreSignal(sem, device_id=jnp.int32(i)) for i in range(3))
    )


def store_to_all(names, x, o, tile, sem):
    names.multimem_store(x[...], o, ("x",))
    names.semaphore_signal_multicast(sem, collective_axes="x")


KERNELS = {
    store: {"st.b32": 16, "red.release.sys.global.add.u32": 1},
    load: {"ld.b32": 16},
    reduce: {},
    signal_several: {"red.relaxed.sys.global.add.u32": 3},
    store_to_all: {
        "multimem.st.relaxed.sys.global.f32": 16,
        "multimem.red.release.sys.global.add.u32": 1,
    },
}


@pytest.mark.offline
@pytest.mark.parametrize("body", KERNELS, ids=lambda body: body.__name__)
def test_small_kernels(body):
    def make(names):
        return names.kernel(
            functools.partial(body, names),
            out_type=jax.ShapeDtypeStruct((16, 128), F32),
            scratch_types=[
                names.SMEM((16, 128), F32),
                names.SemaphoreType.REGULAR,
            ],
            compiler_params=names.CompilerParams(
                lowering_semantics=names.LoweringSemantics.Warpgroup
            ),
        )

    found = alike(make, jax.ShapeDtypeStruct((16, 128), F32))
    assert KERNELS[body].items() <= found.items()
