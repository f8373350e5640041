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
    (jnp, (HOLES,), "nansum nanprod nanmax nanmin nanmean nanvar nanstd nancumsum"),
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
    (special, (POSITIVE, ABOVE_1), "betaln xlogy xlog1py gammainc gammaincc rel_entr"),
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
            "select": lambda x: jnp.select([x > 1, x < -1], [x, -x], 0.0),
            "piecewise": lambda x: jnp.piecewise(
                x, [x < 0, x >= 1], [lambda v: -v, lambda v: v * 2, 0.0]
            ),
            "histogram": lambda x: jnp.histogram(x, bins=8, range=(-2, 2)),
            "corrcoef": _exactly(jnp.corrcoef),
            "unstack": jnp.unstack,
            "repeat": lambda x: jnp.repeat(x, 3, axis=0),
            "resize": lambda x: jnp.resize(x, (6, 10)),
            "tri": lambda x: x + jnp.tri(8, 16),
            "indices": lambda x: x + jnp.indices((8, 16))[0],
            "astype": lambda x: x.astype(jnp.bfloat16),
            "at set": lambda x: x.at[2].set(0.0),
            "searchsorted": lambda x: jnp.searchsorted(_EDGES, x),
            "extract": lambda x: jnp.extract(x > 0, x, size=8, fill_value=0),
            "top_k": lambda x: jax.lax.top_k(x, 3),
        },
    ),
    (
        (X, Y),
        {
            "dot": _exactly(lambda x, y: jnp.dot(x, y.T)),
            "einsum of rows": lambda x, y: jnp.einsum("ij,ij->i", x, y),
            "stack": lambda x, y: jnp.stack([x, y]),
        },
    ),
    (
        (HOLES,),
        {
            "nanargmax rows": lambda x: jnp.nanargmax(x, axis=1),
            "nanargmin rows": lambda x: jnp.nanargmin(x, axis=1),
        },
    ),
    (
        (COUNTS,),
        {
            "intersect1d": lambda i: jnp.intersect1d(i[0], i[1], size=8),
            "setdiff1d": lambda i: jnp.setdiff1d(i[0], i[1], size=16),
            "setxor1d": lambda i: jnp.setxor1d(i[0], i[1], size=16),
            "unravel_index": lambda i: jnp.unravel_index(i, (8, 8)),
        },
    ),
    ((SHORT, X), {"polyval": jnp.polyval}),
    ((POSITIVE,), {"polygamma": lambda x: special.polygamma(1, x)}),
    ((ABOVE_1,), {"multigammaln": lambda x: special.multigammaln(x, 2)}),
    ((X, COUNTS), {"take_along_axis": lambda x, i: jnp.take_along_axis(x, i % 8, 0)}),
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
