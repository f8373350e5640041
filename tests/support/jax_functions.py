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
    return jax.default_matmul_precision("highest")(function)


_EDGES = np.linspace(-2, 2, 9, dtype=np.float32)
# Functions with other arguments beside the operands.
_EXPRESSIONS: list[tuple[tuple[np.ndarray, ...], dict[str, Callable[..., Any]]]] = [
    (
        (X,),
        {
            "quantile": lambda x: jnp.quantile(x, 0.3, axis=1),
            "percentile": lambda x: jnp.percentile(x, 30, axis=1),
            "clip": lambda x: jnp.clip(x, -0.5, 0.5),
            "select": lambda x: jnp.select([x > 1, x < -1], [x, -x], 0.0),
            "piecewise": lambda x: jnp.piecewise(
                x, [x < 0, x >= 1], [lambda v: -v, lambda v: v * 2, 0.0]
            ),
            "interp": lambda x: jnp.interp(x, _EDGES, jnp.arange(9.0)),
            "histogram": lambda x: jnp.histogram(x, bins=8, range=(-2, 2)),
            "cov": _exactly(jnp.cov),
            "corrcoef": _exactly(jnp.corrcoef),
            "fill_diagonal": lambda x: jnp.fill_diagonal(x, 0.0, inplace=False),
            "linspace": lambda x: x + jnp.linspace(0, 1, 16),
            "logspace": lambda x: x + jnp.logspace(0, 1, 16),
            "geomspace": lambda x: x + jnp.geomspace(1, 2, 16),
            "kaiser": lambda x: x * jnp.kaiser(16, 3.0),
            "apply_along_axis": lambda x: jnp.apply_along_axis(jnp.sum, 1, x),
            "apply_over_axes": lambda x: jnp.apply_over_axes(jnp.sum, x, (0, 1)),
            "vectorize": lambda x: jnp.vectorize(lambda v: v * 2)(x),
            "exact gelu": lambda x: jax.nn.gelu(x, approximate=False),
            "split": lambda x: jnp.split(x, 2),
            "hsplit": lambda x: jnp.hsplit(x, 2),
            "vsplit": lambda x: jnp.vsplit(x, 2),
            "array_split": lambda x: jnp.array_split(x, 3),
            "dsplit": lambda x: jnp.dsplit(x.reshape(4, 8, 4), 2),
            "unstack": jnp.unstack,
            "tile": lambda x: jnp.tile(x, (2, 2)),
            "repeat": lambda x: jnp.repeat(x, 3, axis=0),
            "roll": lambda x: jnp.roll(x, 3, 1),
            "rollaxis": lambda x: jnp.rollaxis(x, 1),
            "moveaxis": lambda x: jnp.moveaxis(x, 0, 1),
            "swapaxes": lambda x: jnp.swapaxes(x, 0, 1),
            "permute_dims": lambda x: jnp.permute_dims(x, (1, 0)),
            "reshape": lambda x: jnp.reshape(x, (4, 32)),
            "resize": lambda x: jnp.resize(x, (6, 10)),
            "squeeze": lambda x: jnp.squeeze(x[:1]),
            "expand_dims": lambda x: jnp.expand_dims(x, 0),
            "broadcast_to": lambda x: jnp.broadcast_to(x, (2, 8, 16)),
            "delete": lambda x: jnp.delete(x, 3, axis=0),
            "insert": lambda x: jnp.insert(x, 3, 0.0, axis=0),
            "arange": lambda x: x + jnp.arange(16.0),
            "eye": lambda x: x + jnp.eye(8, 16),
            "identity": lambda x: x[:, :8] + jnp.identity(8),
            "tri": lambda x: x + jnp.tri(8, 16),
            "full": lambda x: x + jnp.full((8, 16), 2.0),
            "full_like": lambda x: jnp.full_like(x, 2),
            "indices": lambda x: x + jnp.indices((8, 16))[0],
            "fromfunction": lambda x: x + jnp.fromfunction(jnp.multiply, (8, 16)),
            "ix_": lambda x: x[jnp.ix_(jnp.array([1, 3]), jnp.array([2, 5, 7]))],
            "tril_indices": lambda x: x[jnp.tril_indices(8)],
            "view": lambda x: x.view(jnp.int32),
            "astype": lambda x: x.astype(jnp.bfloat16),
            "at set": lambda x: x.at[2].set(0.0),
            "digitize": lambda x: jnp.digitize(x, _EDGES),
            "searchsorted": lambda x: jnp.searchsorted(_EDGES, x),
            "extract": lambda x: jnp.extract(x > 0, x, size=8, fill_value=0),
            "nonzero": lambda x: jnp.nonzero(x > 0, size=20),
            "argwhere": lambda x: jnp.argwhere(x > 0, size=20),
            "flatnonzero": lambda x: jnp.flatnonzero(x > 0, size=20),
            "partition": lambda x: jnp.partition(x, 3, axis=1),
            "argpartition": lambda x: jnp.argpartition(x, 3, axis=1),
            "top_k": lambda x: jax.lax.top_k(x, 3),
        },
    ),
    (
        (X, Y),
        {
            "dot": _exactly(lambda x, y: jnp.dot(x, y.T)),
            "matmul": _exactly(lambda x, y: jnp.matmul(x, y.T)),
            "tensordot": _exactly(lambda x, y: jnp.tensordot(x, y, ((1,), (1,)))),
            "einsum": _exactly(lambda x, y: jnp.einsum("ij,kj->ik", x, y)),
            "einsum of rows": lambda x, y: jnp.einsum("ij,ij->i", x, y),
            "inner": _exactly(jnp.inner),
            "cross": lambda x, y: jnp.cross(x[:, :3], y[:, :3]),
            "concatenate": lambda x, y: jnp.concatenate([x, y]),
            "stack": lambda x, y: jnp.stack([x, y]),
            "vstack": lambda x, y: jnp.vstack([x, y]),
            "dstack": lambda x, y: jnp.dstack([x, y]),
            "block": lambda x, y: jnp.block([[x, y], [y, x]]),
            "hstack": lambda x, y: jnp.hstack([x, y]),
            "column_stack": lambda x, y: jnp.column_stack([x, y]),
        },
    ),
    (
        (HOLES,),
        {
            "nanquantile": lambda x: jnp.nanquantile(x, 0.3, axis=1),
            "nanpercentile": lambda x: jnp.nanpercentile(x, 30, axis=1),
            "nanargmax rows": lambda x: jnp.nanargmax(x, axis=1),
            "nanargmin rows": lambda x: jnp.nanargmin(x, axis=1),
        },
    ),
    (
        (COUNTS,),
        {
            "bincount": lambda i: jnp.bincount(i.reshape(-1), length=32),
            "unique": lambda i: jnp.unique(i[0], size=16),
            "isin": lambda i: jnp.isin(i, jnp.array([3, 5])),
            "intersect1d": lambda i: jnp.intersect1d(i[0], i[1], size=8),
            "union1d": lambda i: jnp.union1d(i[0], i[1], size=16),
            "setdiff1d": lambda i: jnp.setdiff1d(i[0], i[1], size=16),
            "setxor1d": lambda i: jnp.setxor1d(i[0], i[1], size=16),
            "unravel_index": lambda i: jnp.unravel_index(i, (8, 8)),
            "one_hot": lambda i: jax.nn.one_hot(i[0] % 16, 16),
        },
    ),
    ((MASK, X, Y), {"where": jnp.where}),
    ((SHORT, X), {"polyval": jnp.polyval}),
    ((ROW,), {"vander": lambda x: jnp.vander(x, 4)}),
    ((POSITIVE,), {"polygamma": lambda x: special.polygamma(1, x)}),
    ((ABOVE_1,), {"multigammaln": lambda x: special.multigammaln(x, 2)}),
    ((X, ROWS), {"at add": lambda x, i: x.at[i].add(1.0)}),
    ((X, ROWS), {"take": lambda x, i: jnp.take(x, i, axis=0)}),
    (
        (X, COUNTS),
        {"take_along_axis": lambda x, i: jnp.take_along_axis(x, i % 8, 0)},
    ),
    (
        (X, SHIFTS),
        {
            "put_along_axis": lambda x, i: jnp.put_along_axis(
                x, i[:, :1], 0.0, axis=1, inplace=False
            )
        },
    ),
    ((COUNTS, X, Y), {"choose": lambda i, x, y: jnp.choose(i, [x, y], mode="wrap")}),
    ((ROW, OTHER_ROW), {"lexsort": lambda x, y: jnp.lexsort((x, y))}),
    (
        (COUNTS, SHIFTS),
        {
            "ravel_multi_index": lambda i, j: jnp.ravel_multi_index(
                (i % 8, j), (8, 8), mode="clip"
            )
        },
    ),
    ((MASK,), {"packbits": lambda m: jnp.packbits(m, axis=1)}),
    ((BYTES,), {"unpackbits": lambda b: jnp.unpackbits(b, axis=1)}),
]


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
    for operands, functions in _EXPRESSIONS:
        for name, function in functions.items():
            yield name, function, operands
