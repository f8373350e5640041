# SPDX-License-Identifier: Apache-2.0
"""Values without elements: JAX's code makes them, and kernels are traced without them.

No register layout holds such a value, and it holds no information: its type stands for
it. What an operation makes of it is an operation without it: a concatenation loses
parts, the padding of nothing is a constant.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import _jax, errors
from pallas_gpu.primitives import _registry as registry


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Empty:
    """A value without elements.

    Attributes:
      shape, dtype: its type.
    """

    shape: tuple[int, ...]
    dtype: Any

    @classmethod
    def of(cls, aval: Any) -> Empty:
        """Returns the value of a type."""
        return cls(tuple(aval.shape), aval.dtype)


def is_empty(aval: Any) -> bool:
    """Whether a type is that of a value without elements; references are none."""
    is_ref = isinstance(aval, _jax.AbstractRef)
    return not is_ref and 0 in tuple(getattr(aval, "shape", ()))


def without_elements(primitive: Any, shape: tuple[int, ...]) -> errors.ShapeError:
    """Returns the error for an operation that needs elements."""
    return errors.ShapeError(
        f"{registry.called(primitive)} without elements",
        expected="arrays of one element or more",
        got=f"shape {shape}",
        hint="omit it in Python: sizes are known when the kernel is traced, "
        "and a call whose results are all empty launches nothing",
    )


def results(eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any] | None:
    """Returns the results of an operation if it has a form without empty values.

    None if it is bound as it is: the checks know what those without empty operands are.
    """
    empty = [x for x in operands if isinstance(x, Empty)]
    avals = [v.aval for v in eqn.outvars]
    rule = _RULES.get(eqn.primitive.name)
    if rule is not None and (empty or any(map(is_empty, avals))):
        return list(rule(eqn.params, avals, operands))
    if not empty:
        return None
    if len(empty) == len(operands) and not eqn.effects:
        return _of_nothing(eqn)
    raise without_elements(eqn.primitive, empty[0].shape)


def _of_nothing(eqn: _jax.JaxprEqn) -> list[Any]:
    """Computes what an operation makes of empty arrays alone: one number."""
    with jax.ensure_compile_time_eval():
        made = _jax.bind_again(
            eqn, [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        )
        made = [np.asarray(x) for x in made]
    return [lax.full(x.shape, x.flat[0], x.dtype) for x in made]


def applied(params: Mapping[str, Any], x: Any) -> Any:
    """Applies the function in the parameters of a scatter to all elements."""

    def one(element: Any) -> Any:
        consts = params["update_consts"]
        (result,) = _jax.eval_jaxpr(params["update_jaxpr"], consts, element, element)
        return result

    return functools.reduce(lambda f, _: jax.vmap(f), range(x.ndim), one)(x)


def _present(values: Sequence[Any]) -> list[Any]:
    return [x for x in values if not isinstance(x, Empty)]


# --- operations of which some operands or results have no elements -----------------

Rule = Callable[[Mapping[str, Any], Sequence[Any], list[Any]], Sequence[Any]]


def _concatenate(params: Any, results: Any, operands: list[Any]) -> Sequence[Any]:
    parts = _present(operands)
    return [
        parts[0] if len(parts) == 1 else lax.concatenate(parts, params["dimension"])
    ]


def _pad(params: Any, results: Any, operands: list[Any]) -> Sequence[Any]:
    return [lax.broadcast(operands[1], results[0].shape)]


def _split(params: Any, results: Any, operands: list[Any]) -> Sequence[Any]:
    sizes = [int(n) for n in params["sizes"]]
    parts = iter(lax.split(operands[0], [n for n in sizes if n], params["axis"]))
    return [
        next(parts) if n else Empty.of(r) for n, r in zip(sizes, results, strict=True)
    ]


def _first_operand(params: Any, results: Any, operands: list[Any]) -> Sequence[Any]:
    return [operands[0]]


def _gather(params: Any, results: Any, operands: list[Any]) -> Sequence[Any]:
    """A gather at one position without coordinates: the first part of the operand."""
    operand, indices = operands
    if isinstance(operand, Empty) or indices.shape != (0,):
        raise without_elements(lax.gather_p, operand.shape)
    part = lax.slice(operand, [0] * operand.ndim, params["slice_sizes"])
    return [part.reshape(results[0].shape)]


def _scatter(combine: Callable[[Any, Any], Any] | None) -> Rule:
    """The rule of a scatter: of no updates, or at one position without coordinates."""

    def rule(params: Any, results: Any, operands: list[Any]) -> Sequence[Any]:
        operand, indices, updates = operands
        if isinstance(updates, Empty):
            return [operand]
        inserted = params["dimension_numbers"].inserted_window_dims
        sizes = iter(updates.shape)
        if indices.shape != (0,):
            raise without_elements(lax.scatter_p, indices.shape)
        shape = [1 if d in inserted else next(sizes) for d in range(operand.ndim)]
        starts, part = [0] * operand.ndim, updates.reshape(shape)
        old = lax.slice(operand, starts, shape)
        if combine is not None:
            part = combine(old, part)
        elif params["update_jaxpr"] is not None:
            part = applied(params, old)
        if tuple(shape) == tuple(operand.shape):
            return [part]
        return [lax.dynamic_update_slice(operand, part, starts)]

    return rule


_RULES: dict[str, Rule] = {
    "concatenate": _concatenate,
    "pad": _pad,
    "split": _split,
    "dynamic_update_slice": _first_operand,
    "gather": _gather,
    "scatter": _scatter(None),
}
for _name in ("add", "sub", "mul", "min", "max"):
    # The name has a hyphen up to jax 0.11.
    for _joint in "-_":
        _RULES[f"scatter{_joint}{_name}"] = _scatter(getattr(lax, _name))
