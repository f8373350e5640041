# SPDX-License-Identifier: Apache-2.0
"""Products with scales of blocks, or of a sparse operand, for both packages.

Nothing is loaded: only the instructions, their addresses and descriptors matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.support import sparse_products
from tests.support.differential import tensor_facts as facts
from tests.support.differential.tensor_stream import Instruction
from tests.support.tensor_pairs import PAIR

E4M3, E2M1 = jnp.float8_e4m3fn, jnp.float4_e2m1fn
E8M0 = jnp.float8_e8m0fnu
ROWS = 128
_START = 0x3FFF


@dataclasses.dataclass(frozen=True)
class Narrow:
    """A product of one tile, with `b` along K.

    Attributes:
      n, k: of the product.
      a, b: element types.
      scale: type of the scales; None: no scales.
      block: elements of K that share a scale.
      ctas: 2 for a pair.
      sparse: whether `a` has half of its elements.
      m: rows in each CTA.
      a_in_tmem: whether `a` is in TMEM; it is not copied there.
    """

    n: int
    k: int
    a: Any = E4M3
    b: Any = E4M3
    scale: Any = E8M0
    block: int = 32
    ctas: int = 1
    sparse: bool = False
    m: int = ROWS
    a_in_tmem: bool = False

    @property
    def indices(self) -> int:
        """Of a row of a sparse `a`."""
        return sparse_products.indices(self.k, self.a)

    @property
    def copies(self) -> dict[str, tuple[int, ...]]:
        """Of each array in TMEM what is copied there: its shape in SMEM."""
        result: dict[str, tuple[int, ...]] = {}
        if self.scale is not None:
            groups = self.k // self.block // 4
            result["sa"] = 1, groups, 32, 16
            result["sb"] = -(-self.n // ROWS), groups, 32, 16
            if self.m < ROWS:
                result["sb"] = 1, groups, 64, 16
        if self.sparse:
            result["meta"] = 1, self.indices // 64, 128, 64
        return result

    def kernel(self) -> tuple[Any, ...]:
        """How it is made, and the type of an operand that is not used."""
        return self._make, jax.ShapeDtypeStruct((8, 128), jnp.float32)

    def _make(self, names: Any, params: Any) -> Callable[..., Any]:
        axis = {"collective_axis": "c"} if self.ctas == 2 else {}

        def body(x, out, a, b, acc, done, **arrays):
            def start():
                for name in self.copies:
                    scales = name != "meta"
                    copy = "async_copy_scales_to_tmem"
                    copy = copy if scales else "async_copy_sparse_metadata_to_tmem"
                    getattr(names, copy)(arrays[f"{name}_smem"], arrays[name], **axis)
                given = {"sa": "a_scale", "sb": "b_scale", "meta": "a_sparse_metadata"}
                operands = {given[name]: arrays[name] for name in self.copies}
                right = names.transpose_ref(b, (1, 0))
                left = arrays["a_tmem"] if self.a_in_tmem else a
                names.tcgen05_mma(
                    acc, left, right, done, accumulate=False, **operands, **axis
                )

            start()
            names.barrier_wait(done)

        return names.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((8, 128), jnp.float32),
            scratch_types=self._scratch(names),
            compiler_params=params,
            **(PAIR if self.ctas == 2 else {}),
        )

    def _scratch(self, names: Any) -> dict[str, Any]:
        scales = names.TMEMLayout.SCALES_LAYOUT
        metadata = names.TMEMLayout.SPARSE_METADATA_LAYOUT

        def operand(rows, columns, dtype):
            width = 1024 // jnp.finfo(dtype).bits
            transforms = names.TilingTransform((8, width)), names.SwizzleTransform(128)
            return names.SMEM((rows, columns), dtype, transforms=transforms)

        pair = {"collective": True} if self.ctas == 2 else {}
        stored = self.k // (2 if self.sparse else 1)
        declared = {
            "a": operand(self.m, stored, self.a),
            "b": operand(self.n // self.ctas, self.k, self.b),
            "acc": names.TMEM((self.m, self.n), jnp.float32, **pair),
            "done": names.Barrier(orders_tensor_core=True),
        }
        if self.a_in_tmem:
            declared["a_tmem"] = names.TMEM(
                (self.m, stored), self.a, packed=True, **pair
            )
        for name, shape in self.copies.items():
            dtype = jnp.uint2 if name == "meta" else self.scale
            layout = metadata if name == "meta" else scales
            columns = self.indices if name == "meta" else self.k // self.block
            declared[f"{name}_smem"] = names.SMEM(shape, dtype)
            rows = shape[0] * ROWS
            if shape[2] == 64:
                rows, layout = 2 * ROWS, names.TMEMLayout.SCALES_M64_COLLECTIVE_LAYOUT
            declared[name] = names.TMEM((rows, columns), dtype, layout=layout, **pair)
        return declared


def describe(case: Narrow, instructions: list[Instruction]) -> str:
    """The copies and the products.

    Of each copy, in hexadecimal, the start of the source in 16 bytes and the column of
    the target, from the first of its array. Of each product the instruction descriptor,
    the starts of a and b, and the columns of scales and metadata, from the copies'.
    """
    found = [x for x in instructions if x.opcode.startswith("tcgen05.cp.")]
    texts, columns, at = [], [], 0
    for name, shape in case.copies.items():
        count = shape[0] * shape[1]
        each, at = found[at : at + count], at + count
        (first,), source = each[0].operands
        columns.append(first)
        texts.append(
            f"{name} {each[0].opcode.removeprefix('tcgen05.cp.')} "
            + " ".join(_copy(x, source, first) for x in each)
        )
    assert at == len(found)
    products = [x for x in instructions if x.opcode.startswith("tcgen05.mma.")]
    assert len({x.opcode for x in products}) == 1
    heads = {_operands(case, x) for x in products}
    each = [_product(case, x, products[0], columns) for x in products]
    opcode = products[0].opcode.removeprefix("tcgen05.mma.")
    return "; ".join([*texts, opcode, *heads, " ".join(each)])


def _copy(x: Instruction, source: int, first: int) -> str:
    (target,), start = x.operands
    return f"{(start & _START) - (source & _START):x}:{target - first:x}"


def _operands(case: Narrow, x: Instruction) -> str:
    _, a, b, *_ = x.operands
    left = "tmem" if case.a_in_tmem else facts.Operand.of(a, False, 0)
    return f"{left}; {facts.Operand.of(b, False, 0)}"


def _product(case: Narrow, x: Instruction, first: Instruction, columns: Any) -> str:
    rest = list(x.operands[3:])
    metadata = [rest.pop(0)[0]] if case.sparse else []
    word, *scales = rest[:-1]
    held = [*(scale[0] for scale in scales), *metadata]
    starts = [
        _start(part) - _start(base)
        for part, base in zip(x.operands[1:3], first.operands[1:3], strict=True)
    ]
    offsets = [place - base for place, base in zip(held, columns, strict=True)]
    numbers = ":".join(f"{n:x}" for n in (*starts, *offsets))
    return f"{word:#010x}:{numbers}{'+' if rest[-1] else ''}"


def _start(operand: Any) -> int:
    """Of a descriptor the start address, or the column of TMEM."""
    return operand & _START if isinstance(operand, int) else operand[0]
