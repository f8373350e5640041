# SPDX-License-Identifier: Apache-2.0
"""Bodies in the operations that kernels have: no keys of random numbers, one platform.

A body with keys is traced again, equation by equation: a key becomes a pair of arrays
(`keys.py`), in loops and branches too. A jitted function that closes over arrays is
inlined: they become consts of the body. A loop whose condition is an array, which
`jax.vmap` makes, gets a scalar one. A primitive of `jax.experimental.hijax`, such as
`jnp.searchsorted` of jax 0.12, becomes the operations that it consists of. Of
`jax.lax.platform_dependent` only the code for CUDA is left, so that the emulator runs
what the GPU does. `jax.reshard` is left out: a value of a kernel is on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import _jax, errors, types, walk
from pallas_gpu.entry.plain import constants, keys
from pallas_gpu.entry.plain.keys import Key, KeyData
from pallas_gpu.primitives.scoped import run_scoped_p

_PLATFORM = "cuda"
# The operations that no traced body has.
REPLACED = frozenset({"platform_index", "reshard", *_jax.EXPANSIONS, *keys.OPERATIONS})
# Calls of a function with the equation's operands, and the parameter that has it.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def plain(closed: _jax.ClosedJaxpr, mesh: types.Mesh) -> _jax.ClosedJaxpr:
    """Returns a body without keys and without code for other platforms.

    Args:
      closed: the body.
      mesh: the launch.

    Raises:
      UnsupportedError: random numbers of another generator; code that has no case for
        CUDA; an operation on keys that kernels do not have.
    """
    if not _is_special(closed.jaxpr):
        return closed

    def again(*refs: Any) -> list[Any]:
        return _run(closed.jaxpr, closed.consts, refs)

    avals = [v.aval for v in closed.jaxpr.invars]
    return _jax.trace(again, avals, mesh.axes)[0]


def _is_special(jaxpr: _jax.Jaxpr) -> bool:
    return any(_is_replaced(site.eqn) for site in walk.walk(jaxpr))


def _is_replaced(eqn: _jax.JaxprEqn) -> bool:
    name, atoms = eqn.primitive.name, (*eqn.invars, *eqn.outvars)
    if name in REPLACED or eqn.params.get("branches_platforms"):
        return True
    if name == "while" and _is_for_rows(eqn):
        return True
    if name in _CALLS and constants.of_call(eqn, _CALLS[name]):
        return True
    return any(keys.is_key(atom.aval) for atom in atoms)


def _run(
    jaxpr: _jax.Jaxpr, consts: Sequence[Any], operands: Sequence[Any]
) -> list[Any]:
    """Evaluates a jaxpr in the current trace; keys are `Key`s."""
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, operands, strict=True))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, _jax.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        try:
            with _jax.at_line_of(eqn):
                results = _results(eqn, [value(atom) for atom in eqn.invars])
        except errors.PallasGpuError as error:
            line = _jax.where(eqn)
            raise (error if line is None else error.with_location(line)) from None
        values.update(zip(eqn.outvars, results, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _results(eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name == "platform_index":
        return [np.int32(_case_of(params["platforms"]))]
    if name == "reshard":
        return operands
    if params.get("branches_platforms"):
        branch = params["branches"][_case_of(params["branches_platforms"])]
        return _run(branch.jaxpr, branch.consts, operands[1:])
    if name in _jax.EXPANSIONS:
        expand = _jax.EXPANSIONS[name](eqn)
        closed, _ = _jax.trace(expand, [v.aval for v in eqn.invars])
        return _run(closed.jaxpr, closed.consts, operands)
    if name in keys.OPERATIONS:
        arrays = operands if name == "random_wrap" else _materialized(operands)
        return [keys.OPERATIONS[name](params, *arrays)]
    bodies = [body.jaxpr for body in walk.bodies(eqn)]
    special = any(isinstance(x, Key | KeyData) for x in operands)
    if not special and not _is_replaced(eqn) and not any(map(_is_special, bodies)):
        return _jax.bind_again(eqn, operands)
    if name in _CALLS:
        inner = params[_CALLS[name]]
        jaxpr = getattr(inner, "jaxpr", inner)
        return _run(jaxpr, _jax.consts_of(inner), operands)
    if name in _CONTROL:
        return _CONTROL[name](eqn, _materialized(operands))
    if bodies and name not in keys.SHAPES:
        raise errors.UnsupportedError(
            f"{name} of random keys is not supported in a kernel",
            expected="loops, branches and functions of keys",
            got=name,
            hint="split the key outside of it",
        )
    return _on_words(eqn, operands)


def _case_of(platforms: Sequence[Sequence[str] | None]) -> int:
    """Returns the index of the code for CUDA, or else of the default."""
    for i, names in enumerate(platforms):
        if names is not None and _PLATFORM in names:
            return i
    if None in platforms:
        return list(platforms).index(None)
    raise errors.UnsupportedError(
        "lax.platform_dependent has no code for CUDA",
        expected="cuda=, or default=",
        got=", ".join(name for names in platforms for name in names or ()),
        hint="pass default=",
    )


def _materialized(values: Sequence[Any]) -> list[Any]:
    return [x.array() if isinstance(x, KeyData) else x for x in values]


# --- operations without bodies --------------------------------------------------------


def _on_words(eqn: _jax.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """An operation on shapes of keys, or on an array of their words."""
    name, params = eqn.primitive.name, eqn.params
    if isinstance(operands[0], KeyData) and name == "unstack":
        data = operands[0].key
        if params["axis"] < len(data.shape):
            return [KeyData(key) for key in keys.unstack(params, data)]
    elif isinstance(operands[0], KeyData):
        key = _of_data(name, params, operands[0].key)
        if key is not None:
            return [KeyData(key)]
    operands = _materialized(operands)
    if name in keys.SHAPES and isinstance(operands[0], Key):
        results = keys.SHAPES[name](params, *operands)
        return results if isinstance(results, list) else [results]
    if not any(isinstance(x, Key) for x in operands):
        return _jax.bind_again(eqn, operands)
    words = [
        _jax.bind_again(eqn, [_word(x, part) for x in operands])
        for part in ("high", "low")
    ]
    return [Key(high, low) for high, low in zip(*words, strict=True)]


def _word(x: Any, part: str) -> Any:
    return getattr(x, part) if isinstance(x, Key) else x


def _of_data(name: str, params: dict[str, Any], key: Key) -> Key | None:
    """An operation on the array of words, if it leaves the words together."""
    rank = len(key.shape)
    match name:
        case "slice" if params["strides"] is None:
            starts, limits = params["start_indices"], params["limit_indices"]
            if (starts[rank], limits[rank]) == (0, 2):
                whole = {
                    "start_indices": starts[:rank],
                    "limit_indices": limits[:rank],
                    "strides": None,
                }
                return keys.slice_(whole, key)
        case "squeeze" if rank not in params["dimensions"]:
            return keys.squeeze(params, key)
    return None


# --- control flow ---------------------------------------------------------------------


def _scan(eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    params, body = eqn.params, eqn.params["jaxpr"]
    n_consts, n_carry = _jax.scan_arity(params)
    consts, carry = operands[:n_consts], operands[n_consts : n_consts + n_carry]

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        results = _run(body.jaxpr, body.consts, [*consts, *carry, *xs])
        results = _materialized(results)
        return results[:n_carry], results[n_carry:]

    carry, ys = lax.scan(
        step,
        carry,
        operands[n_consts + n_carry :],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _is_for_rows(eqn: _jax.JaxprEqn) -> bool:
    """Whether a loop's condition is an array: one for each row of its carry."""
    return bool(eqn.params["cond_jaxpr"].out_avals[0].shape)


def _while(eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    params = eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body = operands[:n_cond], operands[n_cond : n_cond + n_body]
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]

    for_rows = _is_for_rows(eqn)

    def condition(carry: list[Any]) -> Any:
        return _run(cond.jaxpr, cond.consts, [*of_cond, *carry])[0]

    def proceeds(carry: list[Any]) -> Any:
        going = condition(carry)
        return jnp.any(going) if for_rows else going

    def step(carry: list[Any]) -> list[Any]:
        after = _materialized(_run(body.jaxpr, body.consts, [*of_body, *carry]))
        if not for_rows:
            return after
        # Rows for which the condition does not hold have left the loop.
        going = condition(carry)
        return [_chosen(going, x, y) for x, y in zip(after, carry, strict=True)]

    return lax.while_loop(proceeds, step, operands[n_cond + n_body :])


def _chosen(rows: Any, x: Any, y: Any) -> Any:
    """Selects from two arrays by their leading dimensions."""
    if not x.shape:
        return jnp.where(rows, x, y)
    dimensions = tuple(range(rows.ndim))
    return lax.select(lax.broadcast_in_dim(rows, x.shape, dimensions), x, y)


def _cond(eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    index, *rest = operands

    def branch(closed: Any) -> Callable[[], list[Any]]:
        return lambda: _materialized(_run(closed.jaxpr, closed.consts, rest))

    return lax.switch(index, [branch(closed) for closed in eqn.params["branches"]])


def _run_scoped(eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    inner = eqn.params["jaxpr"]
    made = inner.invars[len(operands) :]

    def body(*refs: Any) -> list[Any]:
        return _materialized(_run(inner, (), [*operands, *refs]))

    closed, tree = _jax.trace(body, [v.aval for v in made])
    jaxpr = _jax.convert_constvars_jaxpr(closed.jaxpr)
    flat = run_scoped_p.bind(*closed.consts, **{**eqn.params, "jaxpr": jaxpr})
    return jax.tree.unflatten(tree, flat)


_CONTROL: dict[str, Callable[[_jax.JaxprEqn, list[Any]], list[Any]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    run_scoped_p.name: _run_scoped,
}
