# SPDX-License-Identifier: Apache-2.0
"""Matrix products by wgmma: of arrays in SMEM where they are, and of values."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, arch, errors, types
from pallas_gpu.entry.expand import Kernel
from pallas_gpu.entry.integers import cdiv
from pallas_gpu.entry.scoped import of_warpgroup, run_scoped
from pallas_gpu.layouts import Layout
from pallas_gpu.primitives import tma
from pallas_gpu.primitives.registers import layout_cast
from pallas_gpu.primitives.tensor_cores.dot_general import FLOAT8, INT8, Problem
from pallas_gpu.primitives.tensor_cores.mma import InsteadOfWgmma
from pallas_gpu.primitives.tensor_cores.wgmma import check_storage, wgmma, wgmma_wait

# PTX ISA, wgmma.mma_async: N is at most 256 an instruction.
_MAX_COLUMNS = 256
# Bytes of an element: the layout of a left operand in registers.
_LEFT_LAYOUTS = {1: Layout.WGMMA_8BIT, 2: Layout.WGMMA, 4: Layout.WGMMA_32BIT}
# One instruction consumes 32 bytes of K.
_K_BYTES = 32
# Registers of a warpgroup that an accumulator may take: 256 for each thread.
_MAX_ACCUMULATOR = 128 * 256
_TYPES = (
    *map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32)),
    *FLOAT8,
    *INT8,
)
_SIDES = {"a": "left", "b": "right"}
# Bits of the narrowest swizzle that `wgmma` reads.
_SWIZZLE_BITS = 256


@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no truth value
class Matrix:
    """An operand of a product.

    Attributes:
      stored: a value, or a part of an array in SMEM that is not about to be written.
      transposed: whether the operand is its transpose.
    """

    stored: Any
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the operand."""
        rows, columns = self.stored.shape
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def dtype(self) -> Any:
        """The element type."""
        return jnp.dtype(self.stored.dtype)

    @property
    def is_ref(self) -> bool:
        """Whether it is in SMEM."""
        return types.base_aval(self.stored) is not None

    @property
    def T(self) -> Matrix:  # noqa: N802 - numpy's name
        """The transpose."""
        return Matrix(self.stored, not self.transposed)

    def value(self) -> Any:
        """Returns the operand as a value in registers."""
        return self.view().get() if self.is_ref else self.view()

    def view(self) -> Any:
        """Returns the operand where it is: a value, or a reference."""
        return self.stored.T if self.transposed else self.stored


def multiplies(problem: Problem, kernel: Kernel) -> bool:
    """Whether wgmma multiplies the matrices of a problem."""
    if not kernel.target.has(arch.Feature.WGMMA) or problem.is_with_vector:
        return False
    wanted = problem.operand_type
    if problem.is_split:
        wanted = jnp.dtype(jnp.bfloat16)
    if wanted is not None and wanted not in _TYPES:
        return False
    m, n, k = problem.mnk
    k_bytes = k * (1 if wanted is None else wanted.itemsize)
    whole = m % types.WGMMA_ROWS == n % types.WGMMA_COLUMNS == k_bytes % _K_BYTES == 0
    return whole and m * n <= _MAX_ACCUMULATOR


def refusal(a: Matrix, b: Matrix, kernel: Kernel) -> InsteadOfWgmma | None:
    """Why wgmma does not multiply two matrices of a problem that it multiplies.

    In a block of several warpgroups, the copies of operands that it does not read
    where they are may not fit. A block of one warpgroup is then too large.
    """
    limit = kernel.staging_bytes
    moved = _moved(a, b)
    copies = _copies(a, b, moved).values()
    needed = sum(_aligned_bytes(x) for x in copies)
    if limit is None or needed <= limit:
        return None
    what = "both operands" if len(moved) == 2 else f"the {_SIDES[min(moved)]} operand"
    return InsteadOfWgmma(
        f"wgmma reads {what} from SMEM: a copy takes {needed:,} bytes of each of the "
        f"{kernel.mesh.warpgroups} warpgroups, which have {limit:,}",
        f"store {what} to SMEM once for all warpgroups, or use smaller tiles",
    )


def _aligned_bytes(matrix: Matrix) -> int:
    alignment = types.SMEM.alignment
    return cdiv(matrix.stored.size * matrix.dtype.itemsize, alignment) * alignment


def operand(problem: Problem, name: str, stored: Any) -> Matrix:
    """Returns an operand of a product of matrices, by name: `a` or `b`.

    Args:
      stored: the matrix; of several, one of them.
    """
    i = "ab".index(name)
    (axis,) = problem.contracted[i]
    return Matrix(stored, transposed=axis - len(problem.batch[i]) != 1 - i)


def product(
    a: Matrix, b: Matrix, kernel: Kernel, acc: Any = None, init: Any = None
) -> jax.Array | None:
    """Multiplies two matrices on the tensor core of Hopper.

    What wgmma does not read where it is, is stored to scratch memory in SMEM first. The
    tensor core adds in float32 or int32, and reads float32 as tf32.

    Args:
      a: (M, K); see `multiplies`.
      b: (K, N).
      acc: a reference to an accumulator, to which the product is added.
      init: a value to which it is added instead.

    Returns:
      (M, N) in float32, or in int32 for int8; None with `acc`.
    """
    dtype = jnp.int32 if jnp.issubdtype(a.dtype, jnp.integer) else jnp.float32
    kept, moved = _is_kept(a), _moved(a, b)
    copies = _copies(a, b, moved)
    is_shared = len(copies) < len(moved)
    tiles = {k: _tiles(_to_store(x, k)) for k, x in copies.items()}
    given: dict[str, Any] = {}
    if acc is None:
        given["acc"] = types.ACC((a.shape[0], b.shape[1]), dtype)
    stored = moved or any(_is_stored(x, kernel) for x in (a, b))

    def multiply(**refs: Any) -> Any:
        for name, operand in copies.items():
            refs[name][...] = _to_store(operand, name).value()
        if is_shared:
            refs["b"] = refs["a"]
        if stored:
            tma.commit_smem()
        target = refs.get("acc", acc)
        if init is not None:
            target[...] = in_layout(init, Layout.WGMMA, kernel)
        left = _operand(a, "a", refs, _in_registers(a, kernel) if kept else None)
        _multiply(target, left, _operand(b, "b", refs, None))
        if acc is None:
            return target[...]
        wgmma_wait(0)
        return None

    if not tiles or kernel.mesh.warpgroups == 1:
        given = {**tiles, **given}
        return run_scoped(multiply, **given) if given else multiply()

    def staged(**refs: Any) -> Any:
        return of_warpgroup(
            lambda *own: multiply(**dict(zip(tiles, own, strict=True)), **refs),
            *tiles.values(),
        )

    return run_scoped(staged, **given) if given else staged()


def _is_kept(a: Matrix) -> bool:
    """Whether the left operand stays in registers."""
    return a.dtype.itemsize <= 2 and not a.is_ref


def _moved(a: Matrix, b: Matrix) -> dict[str, Matrix]:
    """Returns the operands that are stored to scratch memory first."""
    return {
        name: operand
        for name, operand in (("a", a), ("b", b))
        if not (name == "a" and _is_kept(a)) and not is_readable(operand, name)
    }


def _copies(a: Matrix, b: Matrix, moved: dict[str, Matrix]) -> dict[str, Matrix]:
    """Returns the moved operands of which scratch memory holds a copy of its own."""
    is_shared = len(moved) == 2 and _are_stored_alike(a, b)
    return {k: x for k, x in moved.items() if not (k == "b" and is_shared)}


def _are_stored_alike(a: Matrix, b: Matrix) -> bool:
    """Whether one copy in scratch memory serves both operands."""
    left, right = _to_store(a, "a"), _to_store(b, "b")
    return left.stored is right.stored and left.transposed == right.transposed


def _multiply(acc: Any, a: Any, b: Any) -> None:
    """Multiplies in as many columns at a time as an instruction has."""
    n = b.shape[1]
    if n <= _MAX_COLUMNS:
        wgmma(acc, a, b)
        return
    for start in range(0, n, _MAX_COLUMNS):
        part = slice(start, min(start + _MAX_COLUMNS, n))
        wgmma(acc.at[:, part], a, b.at[:, part])


def _is_stored(operand: Matrix, kernel: Kernel) -> bool:
    """Whether threads store to the array that wgmma reads."""
    if not operand.is_ref:
        return False
    aval = types.base_aval(operand.stored)
    return (tuple(aval.shape), aval.dtype) in kernel.stored


def _in_registers(a: Matrix, kernel: Kernel) -> Any:
    return in_layout(a.value(), _LEFT_LAYOUTS[a.dtype.itemsize], kernel)


def in_layout(x: Any, layout: Any, kernel: Kernel) -> Any:
    """Returns a value in a layout that is required; None requires none.

    Under Warpgroup semantics that is for layout inference to do.
    """
    if layout is None or kernel.semantics is types.LoweringSemantics.Warpgroup:
        return x
    return layout_cast(x, layout)


def is_readable(operand: Matrix, name: str) -> bool:
    """Whether wgmma reads the operand where it is."""
    if not operand.is_ref:
        return False
    try:
        check_storage(operand.view(), name)
    except errors.LayoutError:
        return False
    steps = operand.stored.transforms
    turned = [s for s in steps if isinstance(s, _jax.TransposeTransform)]
    k_is_minor = (operand.transposed + len(turned)) % 2 == (name == "b")
    return k_is_minor or _is_readable_k_major(operand, name)


def _is_readable_k_major(operand: Matrix, name: str) -> bool:
    """Whether wgmma reads the operand with M or N in the minor dimension.

    The hardware transposes 16-bit types only.
    """
    minor = operand.shape[name == "b"]
    return operand.dtype.itemsize == 2 and minor * 16 % _SWIZZLE_BITS == 0


def _to_store(operand: Matrix, name: str) -> Matrix:
    """Returns the matrix to store: as it is if wgmma reads both, or with K minor."""
    if _is_readable_k_major(operand, name):
        return operand.T if operand.transposed else operand
    return operand.T if name == "b" else operand


def _operand(operand: Matrix, name: str, buffers: dict[str, Any], value: Any) -> Any:
    """Returns what wgmma gets as an operand."""
    if value is not None:
        return value
    if name not in buffers:
        return operand.view()
    stored = _to_store(operand, name)
    turned = stored.transposed != operand.transposed
    return buffers[name].T if turned else buffers[name]


def _tiles(matrix: Matrix) -> Any:
    """Declares SMEM for a matrix, as the tensor core reads it."""
    bits = matrix.dtype.itemsize * 8
    swizzle = types.find_swizzle(matrix.shape[-1] * bits, "of an operand of a product")
    transforms = (
        types.TilingTransform((8, swizzle * 8 // bits)),
        types.SwizzleTransform(swizzle),
    )
    return types.SMEM(matrix.shape, matrix.dtype, transforms=transforms).as_internal()
