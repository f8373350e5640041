# SPDX-License-Identifier: Apache-2.0
"""Matrix products of values: `a @ b`, `jnp.dot`, `jnp.einsum`, `lax.dot_general`."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import types
from pallas_gpu.composites import in_place as in_place  # rewrites bodies first
from pallas_gpu.composites import mma, sums, wgmma
from pallas_gpu.composites.wgmma import Matrix
from pallas_gpu.entry.expand import Composite, composite
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives.tensor_cores.dot_general import Problem, require_known


@composite("dot_general")
def _dot_general(composite: Composite, *operands: Any) -> Any:
    given = _given(composite, operands)
    a, b = given["a"], given["b"]
    acc = given.get("acc")
    out = composite.out_aval.dtype if acc is None else acc.dtype
    problem = Problem.make(composite.params, (a, b), out)
    require_known(problem)
    if problem.is_with_vector:
        return sums.product(problem, a, b, composite.kernel).astype(out)
    if not problem.is_of_matrices:
        return _of_many(composite, problem, a, b).astype(out)
    left, right = (wgmma.operand(problem, name, given[name]) for name in "ab")
    result = _product(composite, problem, left, right, acc, given.get("init"))
    return [] if result is None else result.astype(out)


def _of_many(composite: Composite, problem: Problem, a: Any, b: Any) -> Any:
    """Multiplies matrices one after the other, each of several dimensions."""
    lefts, rights = _matrices(problem, 0, a), _matrices(problem, 1, b)
    results = [
        _product(composite, problem, left, right)
        for left, right in zip(lefts, rights, strict=True)
    ]
    stacked = results[0] if len(results) == 1 else jnp.stack(results)
    return stacked.reshape(composite.out_aval.shape)


def _matrices(problem: Problem, i: int, x: Any) -> list[Matrix]:
    """Returns the matrices of an operand: all dimensions of a kind are one."""
    if problem.is_of_stacks:
        parts = x.at if types.base_aval(x) is not None else x
        return [
            wgmma.operand(problem, "ab"[i], parts[j]) for j in range(problem.batches)
        ]
    batch, free, contracted = problem.batch[i], problem.free(i), problem.contracted[i]
    count, rows = problem.batches, problem.mnk[i]
    x = jnp.transpose(x, (*batch, *free, *contracted)).reshape(count, rows, -1)
    return [Matrix(x[j], transposed=i == 1) for j in range(count)]


def _given(composite: Composite, operands: Any) -> dict[str, Any]:
    """Returns the operands by name, parts of references as views."""
    tree = composite.params.get("tree")
    if tree is None:
        return dict(zip("ab", operands, strict=True))
    given = jax.tree.unflatten(tree, operands)
    given = {name: _view(x) for name, x in given.items()}
    given.setdefault("b", given["a"])
    return given


def _view(x: Any) -> Any:
    return types.RefView(x.ref, x.transforms) if isinstance(x, ops.RefOperand) else x


def _product(
    composite: Composite,
    problem: Problem,
    a: Matrix,
    b: Matrix,
    acc: Any = None,
    init: Any = None,
) -> Any:
    """Multiplies two matrices; the result has the type in which it is added."""
    if problem.is_split:
        return _of_parts(composite, problem, a, b)
    if problem.operand_type is not None:
        a, b = (_converted(x, problem.operand_type) for x in (a, b))
    kernel = composite.kernel
    reason = None
    if wgmma.multiplies(problem, kernel):
        reason = wgmma.refusal(a, b, kernel)
        if reason is None:
            return wgmma.product(a, b, kernel, acc, init)
    if acc is not None:
        acc[...] = mma.product(a, b, kernel, acc[...], reason)
        return None
    if mma.multiplies(problem):
        return mma.product(a, b, kernel, init, reason)
    result = sums.of_matrices(problem, a, b, kernel)
    return result if init is None else init + result


def _of_parts(composite: Composite, problem: Problem, a: Matrix, b: Matrix) -> Any:
    """Multiplies float32 matrices as sums of three bfloat16 matrices each.

    The products of small parts are added first. They are NaN where a large part is
    infinite: there the product of the large parts is the result.
    """
    narrow = problem.of_type(jnp.bfloat16)
    lefts, rights = _parts(a), _parts(b)
    pairs = itertools.product(range(3), range(3))
    *small, _ = sorted(pairs, key=sum, reverse=True)[-problem.parts :]
    total = None
    for i, j in small:
        total = _product(composite, narrow, lefts[i], rights[j], init=total)
    total = jnp.where(total == total, total, 0.0)
    return _product(composite, narrow, lefts[0], rights[0], init=total)


def _parts(operand: Matrix) -> list[Matrix]:
    """Splits float32 elements into three bfloat16 parts, of 8 bits each."""
    rest, parts = Matrix(operand.stored).value().astype(jnp.float32), []
    for _ in range(3):
        part = rest.astype(jnp.bfloat16)
        wide = part.astype(jnp.float32)
        rest = jnp.where(jnp.abs(wide) < jnp.inf, rest - wide, 0.0)
        parts.append(Matrix(part, operand.transposed))
    return parts


def _converted(operand: Matrix, dtype: Any) -> Matrix:
    if operand.dtype == dtype:
        return operand
    return Matrix(jnp.asarray(operand.stored).astype(dtype), operand.transposed)
