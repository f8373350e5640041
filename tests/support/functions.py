# SPDX-License-Identifier: Apache-2.0
"""Functions of arrays as kernels: they read whole arrays and store the results."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from tests.support import everywhere


def kernel_of(function: Callable, *args: np.ndarray, **options) -> Callable:
    """A kernel that reads whole arrays and stores the results of a function."""
    outs = jax.tree.leaves(jax.eval_shape(function, *args))

    def body(*refs):
        results = function(*(ref[...] for ref in refs[: len(args)]))
        for ref, x in zip(refs[len(args) :], jax.tree.leaves(results), strict=True):
            ref[...] = x

    return everywhere.kernel(body, outs, **options)


def check(
    function: Callable, *args: np.ndarray, rtol: float = 0, atol: float = 0, **options
) -> None:
    """Compares the kernel of a function, executed everywhere, with JAX."""
    expected = jax.tree.leaves(jax.jit(function)(*args))
    make = kernel_of(function, *args, **options)
    everywhere.check(make, args, expected, rtol=rtol, atol=atol)
