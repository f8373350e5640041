# SPDX-License-Identifier: Apache-2.0
"""Updates by a function, and sums of bools: what works, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.entry_kernels import f32, numbers
from tests.support.refusal import refused

APPLIED = {
    "an index": lambda x: x.at[2].apply(jnp.square),
    "an element": lambda x: x.at[2, 3].apply(lambda v: v + 5),
    "a slice": lambda x: x.at[1:3, 4:].apply(jnp.square),
    "everything": lambda x: x.at[...].apply(jnp.square),
    "out of bounds": lambda x: x.at[8].apply(jnp.square),
    "a captured scalar": lambda x: x.at[1:3].apply(lambda v: v * x.shape[0]),
    "unique indices": lambda x: x.at[:, jnp.arange(4) * 3].apply(
        jnp.square, unique_indices=True
    ),
}


@pytest.mark.parametrize("name", APPLIED)
def test_a_function_is_applied_to_the_selected_elements(name):
    function = APPLIED[name]
    x = numbers(8, 16)

    def body(x, o):
        o[...] = function(x[...])

    everywhere.run(body, [x], np.asarray(function(jnp.asarray(x))))


@refused
def test_a_function_of_indices_that_may_be_equal_is_refused():
    def body(x, i, o):
        o[...] = x[...].at[i[...]].apply(jnp.square)  # HERE

    indices = np.array([1, 3, 3, 7], np.int32)
    jax.make_jaxpr(plgpu.kernel(body, f32(8, 16)))(numbers(8, 16), indices)


@pytest.mark.parametrize("kind", ["add", "mul"])
@refused
def test_bools_are_neither_added_nor_multiplied(kind):
    def body(x, o):
        o[...] = getattr(x[...].at[1], kind)(True)  # HERE

    kernel = plgpu.kernel(body, jax.ShapeDtypeStruct((8, 16), jnp.bool_))
    jax.make_jaxpr(kernel)(numbers(8, 16) > 3)
