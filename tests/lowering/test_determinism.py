# SPDX-License-Identifier: Apache-2.0
"""The same kernel becomes the same bytes: JAX's and XLA's caches depend on it."""

import hashlib
import os
import pathlib
import subprocess
import sys

import pytest

PROGRAM = """
import functools
import jax, jax.numpy as jnp
import pallas_gpu as plgpu
from pallas_gpu import arch, compiler
from pallas_gpu.entry import call
from pallas_gpu.runtime.serialize import serialize

TILING = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))

def body(infers, x_ref, o_ref, tile, barrier):
    i = jax.lax.axis_index("i")
    rows = plgpu.ds(i * 64, 64)
    plgpu.copy_gmem_to_smem(x_ref.at[rows], tile, barrier)
    plgpu.barrier_wait(barrier)
    x = tile[...]
    if infers:
        x = x + jax.lax.fori_loop(0, 3, lambda _, c: c + x.T, jnp.zeros((128, 64))).T
        x = x - x.sum(axis=0)
    tile[...] = jnp.exp(x - x.max(axis=1, keepdims=True))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, o_ref.at[rows])
    plgpu.wait_smem_to_gmem(0)

def lowered_bytes(semantics="Warpgroup", line_info=False):
    kernel = plgpu.kernel(
        functools.partial(body, semantics == "Warpgroup"),
        out_type=jax.ShapeDtypeStruct((128, 128), jnp.float32),
        grid=(2,), grid_names=("i",),
        scratch_types=[plgpu.SMEM((64, 128), jnp.float32, transforms=TILING),
                       plgpu.Barrier()],
        compiler_params=plgpu.CompilerParams(
            line_info=line_info,
            lowering_semantics=plgpu.LoweringSemantics[semantics]))
    jaxpr = jax.make_jaxpr(kernel)(jax.ShapeDtypeStruct((128, 128), jnp.float32))
    params = call.CallParams(**jaxpr.eqns[0].params)
    module = compiler.lower(params, arch.SM_90A).module
    return serialize(module, keep_locations=line_info).bytecode
"""


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "kernel_of_the_test.py"
    file.write_text(PROGRAM)
    return file


def hash_in_a_process(file: pathlib.Path, hash_seed: str, semantics: str) -> str:
    code = (
        "import hashlib, kernel_of_the_test as k;"
        f"print(hashlib.sha256(k.lowered_bytes({semantics!r})).hexdigest())"
    )
    root = pathlib.Path(__file__).parents[2]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONHASHSEED": hash_seed,
        "PYTHONPATH": f"{file.parent}{os.pathsep}{root}",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=file.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def load(program):
    namespace: dict = {}
    exec(compile(program.read_text(), str(program), "exec"), namespace)
    return namespace["lowered_bytes"]


BOTH = pytest.mark.parametrize("semantics", ["Lane", "Warpgroup"])


@BOTH
def test_directory_process_and_hash_seed_change_nothing(program, tmp_path, semantics):
    other = tmp_path / "elsewhere" / program.name
    other.parent.mkdir()
    other.write_text(program.read_text())
    here = hashlib.sha256(load(program)(semantics)).hexdigest()
    assert hash_in_a_process(program, "1", semantics) == here
    assert hash_in_a_process(other, "2", semantics) == here


@BOTH
def test_lines_are_kept_only_where_they_are_asked_for(program, semantics):
    lowered_bytes = load(program)
    assert b"kernel_of_the_test" not in lowered_bytes(semantics)
    assert b"kernel_of_the_test" in lowered_bytes(semantics, line_info=True)
