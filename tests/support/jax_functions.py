# SPDX-License-Identifier: Apache-2.0
"""Functions of `jax.numpy`, `jax.nn` and `jax.scipy.special`, with operands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy import special

_RANDOM = np.random.default_rng(0)
X = _RANDOM.normal(size=(8, 16)).astype(np.float32)
Y = _RANDOM.normal(size=(8, 16)).astype(np.float32)
POSITIVE = np.abs(X) + np.float32(0.5)
ABOVE_1 = POSITIVE + np.float32(1)
BELOW_1 = np.clip(X / 3, -0.95, 0.95).astype(np.float32)
FRACTION = np.abs(BELOW_1) + np.float32(0.01)
HOLES = np.where(X > 1, np.float32("nan"), X)
COUNTS = _RANDOM.integers(1, 30, (8, 16)).astype(np.int32)
INTEGERS = _RANDOM.integers(-50, 50, (8, 16)).astype(np.int32)
SHIFTS = _RANDOM.integers(0, 8, (8, 16)).astype(np.int32)
MASK, OTHER_MASK = X > 0, Y > 0
BYTES = COUNTS.astype(np.uint8)
ROW, OTHER_ROW, SHORT = X[0].copy(), Y[0].copy(), Y[0, :5].copy()
COLUMN = X[:, 0].copy()
ROWS = np.array([3, 0, 7, 5], np.int32)

# By a name for the test: a function, and its operands.
Expressions = dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]]
# Names of functions, for the operands that all of them take.
_OF_ARRAYS: list[tuple[Any, tuple[np.ndarray, ...], str]] = [
    (
        jnp,
        (X,),
        "abs absolute fabs ceil floor trunc rint round around sign signbit square "
        "exp exp2 expm1 sin cos tan sinh cosh tanh arctan atan arcsinh asinh cbrt "
        "negative positive deg2rad degrees rad2deg radians isfinite isinf isnan "
        "isneginf isposinf isreal iscomplex real imag conj conjugate angle sinc i0 "
        "reciprocal nan_to_num copy ravel transpose matrix_transpose fliplr flipud "
        "flip rot90 atleast_1d atleast_2d atleast_3d spacing frexp modf sum prod "
        "max min amax amin mean var std median ptp cumsum cumprod argmax argmin "
        "count_nonzero any all average sort argsort nansum nanprod nanmax nanmin "
        "nanmean nanvar nanstd nancumsum nancumprod nanargmax nanargmin nanmedian "
        "diff ediff1d trapezoid unwrap gradient diagonal trace tril triu diag "
        "ones_like zeros_like",
    ),
    (
        jnp,
        (HOLES,),
        "nansum nanprod nanmax nanmin nanmean nanvar nanstd nancumsum",
    ),
    (jnp, (HOLES,), "nancumprod nanmedian nan_to_num isnan"),
    (jnp, (ABOVE_1,), "log log10 log2 log1p sqrt arccosh acosh"),
    (jnp, (BELOW_1,), "arcsin asin arccos acos arctanh atanh"),
    (
        jnp,
        (X, Y),
        "add subtract multiply divide true_divide arctan2 atan2 copysign heaviside "
        "hypot logaddexp logaddexp2 maximum minimum fmax fmin nextafter equal "
        "not_equal greater greater_equal less less_equal isclose allclose "
        "array_equal array_equiv mod remainder fmod floor_divide divmod append vdot "
        "vecdot broadcast_arrays",
    ),
    (jnp, (POSITIVE, Y), "power pow float_power"),
    (jnp, (X, SHIFTS), "ldexp"),
    (
        jnp,
        (INTEGERS, COUNTS),
        "bitwise_and bitwise_or bitwise_xor gcd lcm floor_divide mod fmod remainder "
        "divmod",
    ),
    (
        jnp,
        (INTEGERS,),
        "bitwise_invert bitwise_not invert bitwise_count abs sign square",
    ),
    (
        jnp,
        (INTEGERS, SHIFTS),
        "left_shift right_shift bitwise_left_shift bitwise_right_shift",
    ),
    (jnp, (MASK, OTHER_MASK), "logical_and logical_or logical_xor"),
    (jnp, (MASK,), "logical_not"),
    (jnp, (ROW,), "diag diagflat polyder polyint"),
    (jnp, (ROW, OTHER_ROW), "outer polyadd polysub meshgrid kron"),
    (jnp, (X, OTHER_ROW), "matvec"),
    (jnp, (COLUMN, Y), "vecmat"),
    (
        jax.nn,
        (X,),
        "celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu "
        "log_sigmoid log_softmax logsumexp logmeanexp mish relu relu6 selu sigmoid "
        "silu soft_sign softmax softplus sparse_plus sparse_sigmoid squareplus "
        "standardize swish tanh identity",
    ),
    (jax.nn, (POSITIVE,), "log1mexp"),
    (
        special,
        (POSITIVE,),
        "erf erfc digamma gammaln i0 i0e i1 i1e expit ndtr log_ndtr entr spence expi",
    ),
    (special, (FRACTION,), "erfinv logit"),
    (
        special,
        (POSITIVE, ABOVE_1),
        "betaln xlogy xlog1py gammainc gammaincc rel_entr",
    ),
    (special, (ABOVE_1, POSITIVE), "zeta"),
    (special, (POSITIVE, ABOVE_1, FRACTION), "betainc"),
]
_ALONG_AN_AXIS = (
    "sum prod max min mean var std median cumsum cumprod argmax argmin any all average "
    "sort argsort diff flip count_nonzero ptp cumulative_sum cumulative_prod"
)
_PADDINGS = (
    "constant edge reflect symmetric wrap linear_ramp maximum mean minimum median"
)
_WINDOWS = "bartlett blackman hamming hanning"


def _exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with products that are as precise as other operations."""

    def exact(*operands: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return function(*operands)

    return exact


def _of_numbers() -> Expressions:
    """Functions that compute."""
    x, xy = (X,), (X, Y)
    edges = np.linspace(-2, 2, 9, dtype=np.float32)
    return {
        "quantile": (lambda x: jnp.quantile(x, 0.3, axis=1), x),
        "percentile": (lambda x: jnp.percentile(x, 30, axis=1), x),
        "nanquantile": (lambda x: jnp.nanquantile(x, 0.3, axis=1), (HOLES,)),
        "nanpercentile": (lambda x: jnp.nanpercentile(x, 30, axis=1), (HOLES,)),
        "nanargmax rows": (lambda x: jnp.nanargmax(x, axis=1), (HOLES,)),
        "nanargmin rows": (lambda x: jnp.nanargmin(x, axis=1), (HOLES,)),
        "clip": (lambda x: jnp.clip(x, -0.5, 0.5), x),
        "where": (jnp.where, (MASK, X, Y)),
        "select": (lambda x: jnp.select([x > 1, x < -1], [x, -x], 0.0), x),
        "piecewise": (
            lambda x: jnp.piecewise(
                x, [x < 0, x >= 1], [lambda v: -v, lambda v: v * 2, 0.0]
            ),
            x,
        ),
        "interp": (lambda x: jnp.interp(x, edges, jnp.arange(9.0)), x),
        "histogram": (lambda x: jnp.histogram(x, bins=8, range=(-2, 2)), x),
        "dot": (lambda x, y: jnp.dot(x, y.T, precision="highest"), xy),
        "matmul": (lambda x, y: jnp.matmul(x, y.T, precision="highest"), xy),
        "tensordot": (
            lambda x, y: jnp.tensordot(x, y, ((1,), (1,)), precision="highest"),
            xy,
        ),
        "einsum": (
            lambda x, y: jnp.einsum("ij,kj->ik", x, y, precision="highest"),
            xy,
        ),
        "einsum of rows": (lambda x, y: jnp.einsum("ij,ij->i", x, y), xy),
        "inner": (lambda x, y: jnp.inner(x, y, precision="highest"), xy),
        "cov": (_exactly(jnp.cov), x),
        "corrcoef": (_exactly(jnp.corrcoef), x),
        "cross": (lambda x, y: jnp.cross(x[:, :3], y[:, :3]), xy),
        "polyval": (jnp.polyval, (SHORT, X)),
        "vander": (lambda x: jnp.vander(x, 4), (ROW,)),
        "fill_diagonal": (lambda x: jnp.fill_diagonal(x, 0.0, inplace=False), x),
        "linspace": (lambda x: x + jnp.linspace(0, 1, 16), x),
        "logspace": (lambda x: x + jnp.logspace(0, 1, 16), x),
        "geomspace": (lambda x: x + jnp.geomspace(1, 2, 16), x),
        "kaiser": (lambda x: x * jnp.kaiser(16, 3.0), x),
        "apply_along_axis": (lambda x: jnp.apply_along_axis(jnp.sum, 1, x), x),
        "apply_over_axes": (lambda x: jnp.apply_over_axes(jnp.sum, x, (0, 1)), x),
        "vectorize": (lambda x: jnp.vectorize(lambda v: v * 2)(x), x),
        "exact gelu": (lambda x: jax.nn.gelu(x, approximate=False), x),
        "polygamma": (lambda x: special.polygamma(1, x), (POSITIVE,)),
        "multigammaln": (lambda x: special.multigammaln(x, 2), (ABOVE_1,)),
    }


def _of_shapes() -> Expressions:
    """Functions that move elements, or make arrays."""
    x, xy = (X,), (X, Y)
    return {
        "concatenate": (lambda x, y: jnp.concatenate([x, y]), xy),
        "stack": (lambda x, y: jnp.stack([x, y]), xy),
        "vstack": (lambda x, y: jnp.vstack([x, y]), xy),
        "dstack": (lambda x, y: jnp.dstack([x, y]), xy),
        "block": (lambda x, y: jnp.block([[x, y], [y, x]]), xy),
        "split": (lambda x: jnp.split(x, 2), x),
        "hsplit": (lambda x: jnp.hsplit(x, 2), x),
        "vsplit": (lambda x: jnp.vsplit(x, 2), x),
        "array_split": (lambda x: jnp.array_split(x, 3), x),
        "dsplit": (lambda x: jnp.dsplit(x.reshape(4, 8, 4), 2), x),
        "unstack": (jnp.unstack, x),
        "tile": (lambda x: jnp.tile(x, (2, 2)), x),
        "repeat": (lambda x: jnp.repeat(x, 3, axis=0), x),
        "roll": (lambda x: jnp.roll(x, 3, 1), x),
        "rollaxis": (lambda x: jnp.rollaxis(x, 1), x),
        "moveaxis": (lambda x: jnp.moveaxis(x, 0, 1), x),
        "swapaxes": (lambda x: jnp.swapaxes(x, 0, 1), x),
        "permute_dims": (lambda x: jnp.permute_dims(x, (1, 0)), x),
        "reshape": (lambda x: jnp.reshape(x, (4, 32)), x),
        "resize": (lambda x: jnp.resize(x, (6, 10)), x),
        "squeeze": (lambda x: jnp.squeeze(x[:1]), x),
        "expand_dims": (lambda x: jnp.expand_dims(x, 0), x),
        "broadcast_to": (lambda x: jnp.broadcast_to(x, (2, 8, 16)), x),
        "delete": (lambda x: jnp.delete(x, 3, axis=0), x),
        "insert": (lambda x: jnp.insert(x, 3, 0.0, axis=0), x),
        "hstack": (lambda x, y: jnp.hstack([x, y]), xy),
        "column_stack": (lambda x, y: jnp.column_stack([x, y]), xy),
        "arange": (lambda x: x + jnp.arange(16.0), x),
        "eye": (lambda x: x + jnp.eye(8, 16), x),
        "identity": (lambda x: x[:, :8] + jnp.identity(8), x),
        "tri": (lambda x: x + jnp.tri(8, 16), x),
        "full": (lambda x: x + jnp.full((8, 16), 2.0), x),
        "full_like": (lambda x: jnp.full_like(x, 2), x),
        "indices": (lambda x: x + jnp.indices((8, 16))[0], x),
        "fromfunction": (
            lambda x: x + jnp.fromfunction(lambda i, j: i * j, (8, 16)),
            x,
        ),
        "ix_": (lambda x: x[jnp.ix_(jnp.array([1, 3]), jnp.array([2, 5, 7]))], x),
        "tril_indices": (lambda x: x[jnp.tril_indices(8)], x),
        "view": (lambda x: x.view(jnp.int32), x),
        "astype": (lambda x: x.astype(jnp.bfloat16), x),
        "at set": (lambda x: x.at[2].set(0.0), x),
        "at add": (lambda x, i: x.at[i].add(1.0), (X, ROWS)),
    }


def _of_indices() -> Expressions:
    """Functions of indices and of orders."""
    x = (X,)
    edges = np.linspace(-2, 2, 9, dtype=np.float32)
    return {
        "digitize": (lambda x: jnp.digitize(x, edges), x),
        "searchsorted": (lambda x: jnp.searchsorted(edges, x), x),
        "bincount": (lambda i: jnp.bincount(i.reshape(-1), length=32), (COUNTS,)),
        "take": (lambda x, i: jnp.take(x, i, axis=0), (X, ROWS)),
        "take_along_axis": (
            lambda x, i: jnp.take_along_axis(x, i % 8, 0),
            (X, COUNTS),
        ),
        "put_along_axis": (
            lambda x, i: jnp.put_along_axis(x, i[:, :1], 0.0, axis=1, inplace=False),
            (X, SHIFTS),
        ),
        "choose": (
            lambda i, x, y: jnp.choose(i, [x, y], mode="wrap"),
            (COUNTS, X, Y),
        ),
        "extract": (lambda x: jnp.extract(x > 0, x, size=8, fill_value=0), x),
        "nonzero": (lambda x: jnp.nonzero(x > 0, size=20), x),
        "argwhere": (lambda x: jnp.argwhere(x > 0, size=20), x),
        "flatnonzero": (lambda x: jnp.flatnonzero(x > 0, size=20), x),
        "lexsort": (lambda x, y: jnp.lexsort((x, y)), (ROW, OTHER_ROW)),
        "partition": (lambda x: jnp.partition(x, 3, axis=1), x),
        "argpartition": (lambda x: jnp.argpartition(x, 3, axis=1), x),
        "top_k": (lambda x: jax.lax.top_k(x, 3), x),
        "unique": (lambda i: jnp.unique(i[0], size=16), (COUNTS,)),
        "isin": (lambda i: jnp.isin(i, jnp.array([3, 5])), (COUNTS,)),
        "intersect1d": (lambda i: jnp.intersect1d(i[0], i[1], size=8), (COUNTS,)),
        "union1d": (lambda i: jnp.union1d(i[0], i[1], size=16), (COUNTS,)),
        "setdiff1d": (lambda i: jnp.setdiff1d(i[0], i[1], size=16), (COUNTS,)),
        "setxor1d": (lambda i: jnp.setxor1d(i[0], i[1], size=16), (COUNTS,)),
        "unravel_index": (lambda i: jnp.unravel_index(i, (8, 8)), (COUNTS,)),
        "ravel_multi_index": (
            lambda i, j: jnp.ravel_multi_index((i % 8, j), (8, 8), mode="clip"),
            (COUNTS, SHIFTS),
        ),
        "packbits": (lambda m: jnp.packbits(m, axis=1), (MASK,)),
        "unpackbits": (lambda b: jnp.unpackbits(b, axis=1), (BYTES,)),
        "one_hot": (lambda i: jax.nn.one_hot(i[0] % 16, 16), (COUNTS,)),
    }


def cases() -> Iterator[tuple[str, Callable[..., Any], tuple[np.ndarray, ...]]]:
    """Yields each function: a name for the test, the function, its operands."""
    for module, operands, names in _OF_ARRAYS:
        for name in names.split():
            kinds = "-".join(x.dtype.name for x in operands)
            yield f"{name}-{kinds}", getattr(module, name), operands
    for name in _ALONG_AN_AXIS.split():
        for axis in (0, 1):
            function = functools.partial(getattr(jnp, name), axis=axis)
            yield f"{name} along {axis}", function, (X,)
    for mode in _PADDINGS.split():
        yield f"pad {mode}", functools.partial(jnp.pad, pad_width=2, mode=mode), (X,)
    for name in _WINDOWS.split():
        window = getattr(jnp, name)
        yield name, lambda x, window=window: x * window(16), (X,)
    expressions = {**_of_numbers(), **_of_shapes(), **_of_indices()}
    for name, (function, operands) in expressions.items():
        yield name, function, operands
