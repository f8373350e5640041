# SPDX-License-Identifier: Apache-2.0
"""What `import pallas_gpu` imports, and what the first uses of it import then."""

from __future__ import annotations

import subprocess
import sys

import pytest

LATER = {
    *("compiler", "emitters", "emulator", "explanation", "lockstep", "lowering"),
    *("offline", "ops", "testing", "verdict"),
}
COMPILER = {"compiler", "emitters", "lowering"}

PROGRAM = f"""
import sys
import jax
import jax.numpy as jnp
import pallas_gpu as plgpu

def body(x, out):
    out[...] = jnp.exp(x[...] + 1)

array = jax.ShapeDtypeStruct((128,), jnp.float32)
f = plgpu.kernel(body, out_type=array)
emitted = plgpu.kernel(body, out_type=array, interpret="emitted")
x = jnp.ones(128)
cuda = dict(lowering_platforms=("cuda",))
for use in sys.argv[1:]:
    eval(use)
    names = [name.split(".") for name in sys.modules if "." in name]
    rooms = {{room for package, room, *_ in names if package == "pallas_gpu"}}
    print(*rooms & {LATER})
"""

# The first uses in a process, and the rooms that each one adds.
USES = {
    "eager": [
        ("None", set()),
        ("jax.jit(f).trace(x)", set()),
        ("jax.jit(jax.vmap(f)).trace(jnp.ones((2, 128)))", set()),
        ("f(x)", {"emulator"}),
        ("emitted(x)", {*COMPILER, "lockstep"}),
        ("plgpu.check", {"verdict"}),
    ],
    "jitted": [
        ("jax.jit(lambda x: f(x) + 1)(x)", {"emulator"}),
        ("jax.jit(f).trace(x).lower(**cuda)", COMPILER),
    ],
    "on a GPU": [
        ("jax.jit(f).trace(x).lower(**cuda)", COMPILER),
        ("plgpu.offline.lower(f, x)", {"offline"}),
        ("plgpu.emulate_mesh", {"emulator"}),
        ("plgpu.autotune", {"testing"}),
    ],
}


@pytest.mark.parametrize("case", USES)
def test_a_use_imports_what_it_needs(case: str):
    uses = [use for use, _ in USES[case]]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *uses], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    seen, added = set(), []
    for line in done.stdout.splitlines():
        added.append(set(line.split()) - seen)
        seen |= added[-1]
    assert dict(zip(uses, added, strict=True)) == dict(USES[case])
