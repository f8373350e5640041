# SPDX-License-Identifier: Apache-2.0
"""What tab completion and `help` show of the public names."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys

import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from tests.support.entry_kernels import TILE, run

MODULES = [plgpu, plgpu.arch, plgpu.errors, plgpu.layouts, plgpu.offline, plgpu.ops]


def shown(thing: object) -> list[str]:
    """What completion offers before an underscore is typed."""
    return [name for name in dir(thing) if not name.startswith("_")]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_completion_of_a_module_shows_its_public_names(module):
    assert shown(module) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_ops_needs_no_import_of_its_own():
    program = "import pallas_gpu; print(pallas_gpu.ops.matmul.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "matmul\n"


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'opps'"):
        _ = plgpu.opps


TRANSFORM = plgpu.TilingTransform((8, 32))
SHOWN = {
    "SMEM": (plgpu.SMEM, ["name", "value"]),
    "MemorySpace": (plgpu.MemorySpace, ["GMEM", "REGS", "SMEM", "TMEM"]),
    "a declaration": (TILE, ["dtype", "memory_space", "shape", "storage"]),
    "Barrier": (
        plgpu.Barrier(),
        ["num_arrivals", "num_barriers", "orders_tensor_core", "shape", "size"],
    ),
    "ACC": (plgpu.ACC((64, 64)), ["dtype", "init", "shape"]),
    "TilingTransform": (TRANSFORM, ["tiling"]),
}


@pytest.mark.parametrize("name", SHOWN)
def test_completion_of_an_object_shows_its_fields(name):
    thing, names = SHOWN[name]
    assert set(names) <= set(shown(thing))
    assert not {"to_ref", "check", "check_scope", "refusal"} & set(dir(thing))


def test_completion_of_a_part_of_a_reference_shows_what_it_has():
    seen = []

    def body(x, o):
        seen.extend(shown(x.at[0:8]))
        o[...] = x[...]

    run(body)
    assert seen == sorted(
        "T at bitcast dtype get ndim reshape set shape size swap transpose".split()  # noqa: SIM905
    )


SPACES = {
    "SMEM": ["shape", "dtype", "transforms"],
    "TMEM": ["shape", "dtype", "packed", "collective", "layout"],
    "GMEM": ["shape", "dtype", "init", "kept"],
}


@pytest.mark.parametrize("name", SPACES)
def test_help_of_a_memory_space_shows_its_arguments(name):
    space = getattr(plgpu, name)
    assert list(inspect.signature(space).parameters) == SPACES[name]
    top = pydoc.plain(pydoc.render_doc(space)).split("Method resolution order")[0]
    assert "(shape, dtype" in top
    assert all(f" {argument}: " in top for argument in SPACES[name])


def test_a_signature_is_that_of_the_call():
    call = inspect.signature(plgpu.SMEM).bind((8, 8), jnp.float32)
    assert plgpu.SMEM(*call.args, **call.kwargs).shape == (8, 8)
