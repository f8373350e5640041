# SPDX-License-Identifier: Apache-2.0
"""Products whose left operand tcgen05.cp copies to TMEM, of one CTA and of a pair."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from tests.support.tensor_pairs import PairProduct
from tests.support.tensor_products import Product


@dataclasses.dataclass(frozen=True)
class Copied(Product):
    """A product whose left operand tcgen05.cp copies to TMEM.

    Attributes:
      mistake: what the kernel lacks or does wrong.
    """

    a_in_tmem: bool = True
    mistake: str = ""

    def body(self, a, b, out, a_smem, b_smem, acc, loaded, done, a_tmem):
        plgpu.copy_gmem_to_smem(a, a_smem, loaded)
        plgpu.copy_gmem_to_smem(b, b_smem, loaded)
        if self.mistake != "no wait for the operands":
            plgpu.barrier_wait(loaded)
        if self.mistake != "no copy":
            plgpu.async_copy_smem_to_tmem(a_smem, a_tmem)
        if self.mistake == "overwrites the source":
            a_smem[...] = jnp.zeros(a_smem.shape, self.a)
            plgpu.commit_smem()
        if self.mistake == "reads the copy":
            plgpu.async_load_tmem(a_tmem)
        right = b_smem.T if self.b_stored else b_smem
        if self.mistake == "no commit_smem":
            a_smem[...] = jnp.zeros(a_smem.shape, self.a)
            plgpu.async_copy_smem_to_tmem(a_smem, a_tmem)
        plgpu.tcgen05_mma(acc, a_tmem, right, done, accumulate=False)
        if self.mistake == "stores over the copy":
            plgpu.async_store_tmem(a_tmem, jnp.zeros(a_tmem.shape, self.a))
            plgpu.commit_tmem()
        plgpu.barrier_wait(done)
        out[...] = plgpu.async_load_tmem(acc)


@dataclasses.dataclass(frozen=True)
class CopiedByPair(PairProduct):
    """A product of a pair of CTAs whose left operands tcgen05.cp copies to TMEM.

    Attributes:
      waits: whether the leader waits until the operands of both CTAs are there.
    """

    a_in_tmem: bool = True
    tracked: bool = False
    waits: bool = True

    def body(self, a, b, out, a_smem, b_smem, acc, loaded, ready, done, a_tmem):
        self.load(a, b, a_smem, b_smem, loaded, ready)
        plgpu.barrier_arrive(ready)
        if self.waits:
            plgpu.barrier_wait(ready)
        plgpu.async_copy_smem_to_tmem(a_smem, a_tmem, collective_axis="c")
        right, axis = b_smem.T if self.b_stored else b_smem, "c"
        plgpu.tcgen05_mma(
            acc, a_tmem, right, done, accumulate=False, collective_axis=axis
        )
        plgpu.barrier_wait(done)
        rows = plgpu.ds(jax.lax.axis_index(axis) * self.m, self.m)
        out[rows] = plgpu.async_load_tmem(acc)
        if not self.waits:
            plgpu.barrier_wait(ready)
