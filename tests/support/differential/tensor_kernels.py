# SPDX-License-Identifier: Apache-2.0
"""The same tcgen05 kernels for both packages, compiled for sm_100a with no GPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import arch
from tests.support.differential import sides
from tests.support.differential.tensor_stream import Instruction, stream
from tests.support.tensor_pairs import PAIR, PairProduct
from tests.support.tensor_products import BLACKWELL, F32, Product

# Columns of float32 that fit the registers of a warpgroup.
_MOST_LOADED = 128
SEMANTICS = ("Lane", "Warpgroup")
Make = Callable[[Any, Any], Callable[..., Any]]


def ours(make: Make, *args: Any, semantics: str) -> list[Instruction]:
    """Our instructions, of a kernel made of names and parameters."""
    params = plgpu.CompilerParams(
        target=BLACKWELL.target,
        lowering_semantics=getattr(plgpu.LoweringSemantics, semantics),
    )
    (report,) = plgpu.offline.compile(make(plgpu, params), *args, target="sm_100a")
    return stream(report.ptx)


def upstreams(make: Make, *args: Any, semantics: str) -> list[Instruction]:
    """Upstream's instructions, of the same kernel."""
    side = sides.upstream(arch.SM_100A)
    return stream(side.ptx(make(side.names, side.params(semantics)), *args))


_OURS = {name: functools.partial(ours, semantics=name) for name in SEMANTICS}
_THEIRS = {
    f"upstream {s}": functools.partial(upstreams, semantics=s) for s in SEMANTICS
}
beside_upstream = pytest.mark.skipif(
    not jax.__version__.startswith("0.11."), reason="compares with upstream 0.11"
)


def compiled_by(*names: str) -> Any:
    """Gives a test what compiles: `ours` or `upstreams`, under one semantics."""
    found = [
        pytest.param(compile_, id=name, marks=[beside_upstream] * (name in _THEIRS))
        for name, compile_ in (_OURS | _THEIRS).items()
        if name in names
    ]
    return pytest.mark.parametrize("compiled", found)


by_ours, by_upstream = compiled_by(*_OURS), compiled_by(*_THEIRS)
by_each = compiled_by(*_OURS, "upstream Lane")


def product(case: Product) -> tuple[Any, ...]:
    """How a product of one tile is made, maybe by a pair, and its operands' types."""
    whole = case.whole if isinstance(case, PairProduct) else case
    args = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in zip(whole.shapes, (case.a, case.b), strict=True)
    ]
    return functools.partial(_product, case), *args


def _product(case: Product, names: Any, params: Any) -> Callable[..., Any]:
    def storage(dtype: Any) -> tuple[Any, ...]:
        columns = case.swizzle // jnp.dtype(dtype).itemsize
        return names.TilingTransform((8, columns)), names.SwizzleTransform(case.swizzle)

    def turned(ref: Any, stored: bool) -> Any:
        return names.transpose_ref(ref, (1, 0)) if stored else ref

    pair = case.collective
    axis = {"collective_axis": "c"} if pair else {}

    def load(src, dst, loaded, split):
        options = {}
        if pair:
            partition = names.CopyPartition.PARTITIONED(int(split))
            options = {"collective_axes": "c", "leader_tracked": partition}
        names.copy_gmem_to_smem(src, dst, loaded, **options)

    def body(a, b, out, a_smem, b_smem, acc, loaded, done, a_tmem=None):
        load(a, a_smem, loaded, case.a_stored)
        load(b, b_smem, loaded, not case.b_stored)
        if pair:
            leads = lax.axis_index("c") == 0
            names.when(leads)(lambda: names.barrier_wait(loaded))
        else:
            names.barrier_wait(loaded)
        # Only the addresses of the product matter of a left operand in TMEM.
        left = turned(a_smem, case.a_stored) if a_tmem is None else a_tmem
        right = turned(b_smem, case.b_stored)
        for i in range(case.rounds):
            last = done if i == case.rounds - 1 else None
            names.tcgen05_mma(acc, left, right, last, accumulate=i > 0, **axis)
        names.barrier_wait(done)
        if case.n <= _MOST_LOADED:
            rows = names.ds(lax.axis_index("c") * case.m, case.m) if pair else ...
            out[rows] = names.async_load_tmem(acc)

    a_shape, b_shape = case.shapes
    scratch = {
        "a_smem": names.SMEM(a_shape, case.a, transforms=storage(case.a)),
        "b_smem": names.SMEM(b_shape, case.b, transforms=storage(case.b)),
        "acc": tmem(names, (case.m, case.n), case.acc, packed=False, collective=pair),
        "loaded": names.Barrier(num_arrivals=2),
        "done": names.Barrier(orders_tensor_core=True),
    }
    if case.a_in_tmem:
        scratch["a_tmem"] = tmem(
            names, (case.m, case.k), case.a, packed=True, collective=pair
        )
    return names.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(*case.result),
        scratch_types=scratch,
        compiler_params=params,
        **case.mesh,
    )


def tmem(
    names: Any,
    shape: tuple[int, int],
    dtype: Any,
    *,
    packed: bool,
    collective: bool = False,
) -> Any:
    """The declaration of an array; of 32 bits there is nothing to pack."""
    narrow = jnp.dtype(dtype).itemsize < 4
    options = {"collective": True} if collective else {}
    return names.TMEM(shape, dtype, packed=packed if narrow else None, **options)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A store to TMEM and a load.

    Attributes:
      layout: name of the layout of registers, and its arguments.
      rows, columns: of the array.
      dtype: element type.
      packed: whether its elements fill columns.
      pair: whether it lies as one CTA's part of an accumulator of a pair.
      matrices: of an array with a leading dimension, which is stored as a whole.
    """

    layout: tuple[Any, ...]
    rows: int = 128
    columns: int = 64
    dtype: Any = F32
    packed: bool = False
    pair: bool = False
    matrices: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        leading = () if self.matrices is None else (self.matrices,)
        return (*leading, self.rows, self.columns)

    def kernel(self) -> tuple[Any, ...]:
        """How it is made, and the type of its operand."""
        return self._make, jax.ShapeDtypeStruct(self.shape, self.dtype)

    def _make(self, names: Any, params: Any) -> Callable[..., Any]:
        shape, (name, *args) = self.shape, self.layout
        layout = getattr(names.Layout, name)
        layout = layout(*args) if args else layout

        def body(x, out, held):
            names.async_store_tmem(held, names.load(x, layout=layout, optimized=False))
            names.commit_tmem()
            for i in np.ndindex(shape[:-2]):
                out[i] = names.async_load_tmem(held.at[i], layout=layout)
            names.wait_load_tmem()

        held = tmem(names, shape, self.dtype, packed=self.packed)
        if self.pair:
            held = names.TMEM(shape, self.dtype, layout=_of_a_pair(names, self.columns))
        return names.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(shape, self.dtype),
            scratch_types=[held],
            compiler_params=params,
        )


def _of_a_pair(names: Any, columns: int) -> Any:
    return names.TMEMLayout.M64_COLLECTIVE_LAYOUT(columns)


def handover() -> tuple[Any, ...]:
    """A store that a barrier hands to a load."""

    def make(names: Any, params: Any) -> Callable[..., Any]:
        def body(x, out, held, stored):
            value = names.load(x, layout=names.Layout.TCGEN05, optimized=False)
            names.async_store_tmem(held, value)
            names.commit_tmem()
            names.barrier_arrive(stored)
            names.barrier_wait(stored)
            out[...] = names.async_load_tmem(held)
            names.wait_load_tmem()

        return names.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((128, 64), F32),
            scratch_types=[
                names.TMEM((128, 64), F32),
                names.Barrier(orders_tensor_core=True),
            ],
            compiler_params=params,
        )

    return make, jax.ShapeDtypeStruct((128, 64), F32)


def copy(
    columns: int, dtype: Any, swizzle: int | None, ctas: int = 1
) -> tuple[Any, ...]:
    """A copy of 128 rows from SMEM to TMEM, or of a pair; None is no swizzle."""
    axis = {"collective_axis": "c"} if ctas == 2 else {}
    collective = {"collective": True} if ctas == 2 else {}

    def make(names: Any, params: Any) -> Callable[..., Any]:
        row = (swizzle or 16) // jnp.dtype(dtype).itemsize
        transforms = (names.TilingTransform((8, row)),)
        if swizzle is not None:
            transforms += (names.SwizzleTransform(swizzle),)

        def body(x, out, source, held, loaded, done):
            names.copy_gmem_to_smem(x, source, loaded)
            names.barrier_wait(loaded)
            names.async_copy_smem_to_tmem(source, held, **axis)
            names.tcgen05_commit_arrive(done, **axis)
            names.barrier_wait(done)

        return names.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((128, columns), dtype),
            scratch_types=[
                names.SMEM((128, columns), dtype, transforms=transforms),
                tmem(names, (128, columns), dtype, packed=True, **collective),
                names.Barrier(),
                names.Barrier(orders_tensor_core=True),
            ],
            compiler_params=params,
            **(PAIR if ctas == 2 else {}),
        )

    return make, jax.ShapeDtypeStruct((128, columns), dtype)
