# SPDX-License-Identifier: Apache-2.0
"""Kernels that multiply one tile with tcgen05, with data and the expected product."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from pallas_gpu import types
from tests.support import everywhere

BLACKWELL = plgpu.CompilerParams(target="sm_100a")
F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def start_copies(loaded: Any, *pairs: tuple[Any, Any]) -> None:
    """Starts a copy of each source in GMEM to its target in SMEM, on one barrier."""
    for source, target in pairs:
        plgpu.copy_gmem_to_smem(source, target, loaded)


def storage(dtype: Any, swizzle: int = 128) -> tuple[Any, ...]:
    """The transforms of an SMEM operand."""
    columns = swizzle * 8 // types.itemsize_bits(dtype)
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)


def check(case: Any, **options: Any) -> None:
    """Runs the kernel of a case everywhere."""
    operands = case.operands()
    expected = case.expected(*operands)
    everywhere.check(case.make, operands, expected, on_gpu=False, **options)


def check_inferred(case: Any) -> None:
    """As `check`, for operands that are declared without transforms."""
    only = [plgpu.LoweringSemantics.Warpgroup]
    check(case, semantics=only, executed=only)


def check_body(body: Any, case: Any, expected: Any = None, **options: Any) -> None:
    """Runs another body over the operands and the scratch of a case everywhere."""
    operands = case.operands()
    wanted = case.expected(*operands) if expected is None else expected(*operands)
    options = {"scratch_types": case.scratch(), **options}
    everywhere.run(body, operands, wanted, target="sm_100a", on_gpu=False, **options)


def in_tmem(left: Any, a_tmem: Any) -> Any:
    """The left operand; threads copy it where TMEM is given for it."""
    if a_tmem is None:
        return left
    native = plgpu.Layout.TCGEN05_TMEM_NATIVE(32 // (8 * left.dtype.itemsize))
    value = plgpu.load(left, layout=native, optimized=False)
    plgpu.async_store_tmem(a_tmem, value)
    plgpu.commit_tmem()
    return a_tmem


class Case:
    """A kernel of Blackwell's tensor core: `scratch`, `body` and `result`.

    Attributes:
      mesh: options of the kernel that give it several CTAs.
      collective: whether they are a pair.
    """

    mesh: Any = {}  # noqa: RUF012 - nobody changes it
    collective: Any = False

    @property
    def result(self) -> tuple[tuple[int, int], Any]:
        """Shape and type."""
        raise NotImplementedError

    def make(
        self, interpret: Any = None, body: Any = None, **changes: Any
    ) -> Callable[..., Any]:
        """The kernel, or another one with other scratch or options."""
        names = ("num_threads", "thread_name")
        options = {name: changes.pop(name) for name in names if name in changes}
        return plgpu.kernel(
            body or self.body,
            out_type=jax.ShapeDtypeStruct(*self.result),
            scratch_types={**self.scratch(), **changes},
            compiler_params=BLACKWELL,
            interpret=interpret,
            **self.mesh,
            **options,
        )


@dataclasses.dataclass(frozen=True)
class Product(Case):
    """One product of a tile.

    Attributes:
      m, n, k: sizes.
      a, b, acc: element types.
      swizzle: of both operands, in bytes.
      a_stored, b_stored: whether the operand is stored transposed: (K, M) and (N, K).
      a_in_tmem: whether the left operand is copied to TMEM first.
      rounds: number of products added up.
      inferred: whether the operands are declared without transforms.
    """

    m: int = 128
    n: int = 64
    k: int = 64
    a: Any = F16
    b: Any = F16
    acc: Any = F32
    swizzle: int = 128
    a_stored: bool = False
    b_stored: bool = False
    a_in_tmem: bool = False
    rounds: int = 1
    inferred: bool = False

    @property
    def result(self) -> tuple[tuple[int, int], Any]:
        return (self.m, self.n), self.acc

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of the operands as they are stored."""
        a, b = (self.m, self.k), (self.k, self.n)
        return a[::-1] if self.a_stored else a, b[::-1] if self.b_stored else b

    def operands(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Small operands, as they are stored."""
        rng = np.random.default_rng(seed)

        def one(shape: tuple[int, int], dtype: Any) -> np.ndarray:
            low = 0 if jnp.dtype(dtype) == jnp.uint8 else -3
            return rng.integers(low, 4, shape).astype(jnp.dtype(dtype))

        a_shape, b_shape = self.shapes
        return one(a_shape, self.a), one(b_shape, self.b)

    def expected(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The product of operands as they are stored."""
        left, right = np.asarray(a, np.float64), np.asarray(b, np.float64)
        left = left.T if self.a_stored else left
        right = right.T if self.b_stored else right
        return (self.rounds * (left @ right)).astype(jnp.dtype(self.acc))

    def scratch(self) -> dict[str, Any]:
        """The declarations of the kernel."""
        (a_shape, b_shape), narrow = self.shapes, jnp.dtype(self.acc).itemsize < 4
        stored = [
            () if self.inferred else storage(dtype, self.swizzle)
            for dtype in (self.a, self.b)
        ]
        declared = {
            "a_smem": plgpu.SMEM(a_shape, self.a, transforms=stored[0]),
            "b_smem": plgpu.SMEM(b_shape, self.b, transforms=stored[1]),
            "acc": plgpu.TMEM(
                (self.m, self.n),
                self.acc,
                packed=False if narrow else None,
                collective=self.collective,
            ),
            "loaded": plgpu.Barrier(num_arrivals=2),
            "done": plgpu.Barrier(orders_tensor_core=True),
        }
        if self.a_in_tmem:
            packed = True if jnp.dtype(self.a).itemsize < 4 else None
            declared["a_tmem"] = plgpu.TMEM(
                (self.m, self.k), self.a, packed=packed, collective=self.collective
            )
        return declared

    def body(self, a, b, out, a_smem, b_smem, acc, loaded, done, a_tmem=None) -> None:
        """Copies the operands, multiplies them, and stores the product."""
        plgpu.copy_gmem_to_smem(a, a_smem, loaded)
        plgpu.copy_gmem_to_smem(b, b_smem, loaded)
        plgpu.barrier_wait(loaded)
        left = in_tmem(a_smem.T if self.a_stored else a_smem, a_tmem)
        right = b_smem.T if self.b_stored else b_smem
        for i in range(self.rounds):
            last = done if i == self.rounds - 1 else None
            plgpu.tcgen05_mma(acc, left, right, last, accumulate=i > 0)
        plgpu.barrier_wait(done)
        out[...] = plgpu.async_load_tmem(acc)
