# SPDX-License-Identifier: Apache-2.0
"""Products of values in registers: mma, and `dot_general` as the tensor core adds.

Products with vectors, and those of float32 with precision HIGHEST, are added in the
type of the sum. Other float32 operands are read as tf32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gpu import _jax
from pallas_gpu.emulator.engine.pure import narrow
from pallas_gpu.emulator.gpu.tensor_cores import tensor_core
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.tensor_cores import mma
from pallas_gpu.primitives.tensor_cores.dot_general import FLOAT8, Problem


@registry.register(mma.mma_p, registry.RuleKind.EMULATE)
def _mma(*leaves: Any, tree: Any) -> np.ndarray:
    operands = jax.tree.unflatten(tree, leaves)
    acc = np.array(operands["acc"])
    a, b = (_in_bytes(np.asarray(operands[name])) for name in ("a", "b"))
    with np.errstate(all="ignore"):
        tensor_core.accumulate(acc, a, b)
    return acc


def _in_bytes(x: np.ndarray) -> np.ndarray:
    return x.astype(narrow.held(x.dtype)) if narrow.is_integer(x.dtype) else x


@registry.register(_jax.primitive_by_name("dot_general"), registry.RuleKind.EMULATE)
def _dot_general(a: Any, b: Any, **params: Any) -> Any:
    problem = Problem.make(params, (a, b), _result_type(a, b, params))
    shape = _result_shape(problem)
    lefts, rights = (_matrices(problem, i, x) for i, x in enumerate((a, b)))
    with np.errstate(all="ignore"):
        results = [
            _product(problem, left, right.T)
            for left, right in zip(lefts, rights, strict=True)
        ]
    result = np.stack(results).reshape(shape).astype(problem.out)
    return result[()] if result.ndim == 0 else result


def _result_type(a: Any, b: Any, params: dict[str, Any]) -> Any:
    wanted = params["preferred_element_type"]
    if wanted is not None:
        return wanted
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (a, b)]
    dimensions = params["dimension_numbers"]
    return jax.eval_shape(
        lambda x, y: jax.lax.dot_general(x, y, dimensions), *operands
    ).dtype


def _result_shape(problem: Problem) -> list[int]:
    sizes = [problem.shapes[0][d] for d in problem.batch[0]]
    return sizes + [problem.shapes[i][d] for i in (0, 1) for d in problem.free(i)]


def _matrices(problem: Problem, i: int, x: Any) -> Any:
    """Returns the matrices of an operand, with the dimension of the sum as the last."""
    order = (*problem.batch[i], *problem.free(i), *problem.contracted[i])
    _, _, terms = problem.mnk
    turned = np.asarray(x).transpose(order)
    return turned.reshape(problem.batches, problem.mnk[i], terms)


def _product(problem: Problem, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns (M, K) @ (K, N) in the type of the sum."""
    wanted = problem.operand_type
    narrow = problem.is_float8 if wanted is None else wanted.itemsize <= 2
    if problem.is_with_vector or not (narrow or wanted == np.float32):
        return _plain(problem, a, b)
    if wanted is not None:
        a, b = a.astype(wanted), b.astype(wanted)
    if wanted == np.float32 and problem.is_split:
        return tensor_core.product(a, b)
    if wanted is not None and wanted.kind in "iu":
        return _plain(problem, a, b)
    acc = np.zeros((a.shape[0], b.shape[1]), problem.sum_type)
    tensor_core.accumulate(acc, a, b)
    return acc


def _plain(problem: Problem, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the product without the tensor core."""
    kinds = [problem.out, *problem.dtypes]
    if all(np.dtype(d).kind in "iub" for d in kinds):
        return a.astype(np.int64) @ b.astype(np.int64)
    wide = jnp.result_type(np.float32, *(d for d in kinds if d not in FLOAT8))
    return a.astype(wide) @ b.astype(wide)
