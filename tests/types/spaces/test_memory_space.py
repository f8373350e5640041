# SPDX-License-Identifier: Apache-2.0
"""Memory spaces as values, and how many units a declaration occupies in each."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import arch, expect, types
from pallas_gpu.types.spaces import memory_space
from tests.support.refusal import refused

SPACES = (plgpu.GMEM, plgpu.SMEM, plgpu.TMEM, plgpu.REGS)


def test_memory_space_lists_its_members():
    assert tuple(plgpu.MemorySpace) == SPACES
    assert len(plgpu.MemorySpace) == 4
    assert plgpu.SMEM in plgpu.MemorySpace and "smem" in plgpu.MemorySpace
    assert types.BARRIERS not in plgpu.MemorySpace


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_member_is_found_by_attribute_name_and_value(space):
    assert isinstance(space, plgpu.MemorySpace)
    assert getattr(plgpu.MemorySpace, space.name) is space
    assert plgpu.MemorySpace[space.name] is space
    assert plgpu.MemorySpace(space.value) is plgpu.MemorySpace(space) is space


@pytest.mark.parametrize(
    ("name", "space"), [("ANY", plgpu.GMEM), ("DEFAULT", plgpu.SMEM)]
)
def test_names_of_upstreams_spaces_are_other_names(name, space):
    assert getattr(plgpu.MemorySpace, name) is plgpu.MemorySpace[name] is space
    assert name not in dir(plgpu.MemorySpace)


@pytest.mark.parametrize("space", [plgpu.GMEM, plgpu.SMEM], ids=str)
def test_a_memory_reference_declares_an_array(space):
    aval = jax.core.ShapedArray((8, 128), jnp.float32)
    assert plgpu.MemoryRef(aval, space) == space((8, 128), jnp.float32)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_copy_of_a_space_is_the_space(space):
    assert pickle.loads(pickle.dumps(space)) is space
    assert copy.deepcopy(space) is copy.copy(space) is space


def test_spaces_print_as_members_of_an_enum():
    assert (str(plgpu.SMEM), repr(plgpu.SMEM)) == ("smem", "<MemorySpace.SMEM: 'smem'>")
    assert (plgpu.TMEM.name, plgpu.TMEM.value) == ("TMEM", "tmem")


def test_there_is_no_other_space():
    with pytest.raises(ValueError, match="'l2' is not a valid MemorySpace"):
        plgpu.MemorySpace("l2")
    with pytest.raises(KeyError):
        plgpu.MemorySpace["L2"]


def test_declarations_are_values():
    one = plgpu.TMEM((128, 64), jnp.float16, packed=True)
    assert one == plgpu.TMEM((128, 64), jnp.float16, packed=True)
    assert pickle.loads(pickle.dumps(one)) == one
    assert hash(one) == hash(pickle.loads(pickle.dumps(one)))
    assert one != plgpu.SMEM((128, 64), jnp.float16)


@pytest.mark.parametrize("name", ["packed", "collective", "layout"])
@pytest.mark.parametrize("space", [plgpu.GMEM, plgpu.SMEM, plgpu.REGS], ids=str)
@refused
def test_arguments_of_tmem_belong_to_tmem(space, name):
    space((128, 64), jnp.float32, **{name: False})  # HERE


@pytest.fixture
def vmem(monkeypatch):
    """A memory of another machine, with an option of its own."""

    class Vmem(memory_space.MemorySpace):
        name, unit, declared_by = "VMEM", "bytes", "plgpu.VMEM(shape, dtype)"

        @memory_space.declares(lanes=expect.integer(1))
        def __call__(self, shape, dtype, *, lanes=128):
            return types.ScratchType(self, (*shape, lanes), dtype)

    members = type(plgpu.MemorySpace).members
    monkeypatch.setattr(type(plgpu.MemorySpace), "members", dict(members))
    return Vmem()


def test_another_machine_adds_a_space_with_its_own_option(vmem):
    assert plgpu.MemorySpace.VMEM is plgpu.MemorySpace("vmem") is vmem
    assert vmem((8,), jnp.float32, lanes=4).shape == (8, 4)


@refused
def test_no_other_space_has_the_option_of_another_machine(vmem):
    plgpu.SMEM((8,), jnp.float32, lanes=4)  # HERE


@pytest.mark.parametrize(
    ("declaration", "unit", "size"),
    [
        (plgpu.GMEM((3, 5), jnp.float16), "bytes", 30),
        (plgpu.GMEM((3,), jnp.int4), "bytes", 2),
        (plgpu.SMEM((10,), jnp.int8), "bytes", 10),
        (plgpu.SMEM((64, 128), jnp.float16), "bytes", 16384),
        (plgpu.TMEM((128, 64), jnp.float32), "columns", 64),
        (plgpu.ACC((64, 256), jnp.float32), "registers", 128),
        (plgpu.ACC((64, 256), jnp.float16), "registers", 64),
        (plgpu.Barrier(num_barriers=(2, 3)), "barriers", 6),
    ],
)
def test_a_declaration_has_a_size_in_the_unit_of_its_resource(declaration, unit, size):
    resource = declaration.memory_space
    assert (resource.unit, resource.size(declaration.to_ref())) == (unit, size)


@pytest.mark.parametrize("target", [arch.SM_90A, arch.SM_100A], ids=lambda t: t.name)
def test_budgets_are_those_of_the_target(target):
    assert plgpu.SMEM.budget(target) == target.smem_bytes_per_block
    assert plgpu.TMEM.budget(target) == target.tmem_columns
    assert plgpu.REGS.budget(target) == 255
    assert types.BARRIERS.budget(target) * 8 == target.smem_bytes_per_block
