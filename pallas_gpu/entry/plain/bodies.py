# SPDX-License-Identifier: Apache-2.0
"""Bodies in the operations that kernels have: no keys of random numbers, one platform.

A body that has something else is traced again. A key becomes a pair of arrays, a value
without elements nothing (`program.passes`), in loops and branches too. Arrays that a
function in the body closes over become consts of the body. A loop whose condition is an
array, which `jax.vmap` makes, gets a scalar one. A primitive of
`jax.experimental.hijax`, such as `jnp.searchsorted` of jax 0.12, becomes the operations
that it consists of; a loop with `num_stages` becomes one whose loads are copies ahead
(`ahead.py`). Of `jax.lax.platform_dependent` only the code for CUDA is left, so that
the emulator runs what the GPU does. `jax.reshard` is left out: a value of a kernel is
on one device. This precedes all checks, so emulator and compiler see the same body.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import _jax, errors, types
from pallas_gpu.checks import references
from pallas_gpu.entry import warp
from pallas_gpu.entry.control import staged_loop_p
from pallas_gpu.entry.plain import ahead, choice
from pallas_gpu.primitives.warp import warp_map_p
from pallas_gpu.program.bodies import bodies
from pallas_gpu.program.passes import keys, no_elements
from pallas_gpu.program.rewrite import Retrace, is_followed, settled

# The operations that no traced body has.
REPLACED = frozenset(
    {
        "platform_index",
        "reshard",
        staged_loop_p.name,
        *_jax.EXPANSIONS,
        *keys.OPERATIONS,
    }
)


def plain(
    closed: _jax.ClosedJaxpr, mesh: types.Mesh, num_stages: int | None = None
) -> tuple[_jax.ClosedJaxpr, tuple[tuple[str, str], ...]]:
    """Returns a body without keys, empty values and code for other platforms.

    References to arrays without elements stay.

    Args:
      closed: the body.
      mesh: the kernel's.
      num_stages: of the loops: see `CompilerParams`.

    Returns:
      The body; the lines of loads that loops do not copy ahead, and why.
    """
    trace = _Plain(closed, num_stages)
    if not trace.replaces_in(closed.jaxpr):
        return closed, ()

    # Here, as keys of the trace around the kernel are taken apart in that trace.
    captured = [keys.of_array(x) if keys.is_key(x) else x for x in closed.consts]

    def again(*refs: Any) -> list[Any]:
        return settled(trace.run(closed, refs, captured))

    made, _ = _jax.trace(again, [v.aval for v in closed.jaxpr.invars], mesh.axes)
    # The author's function and line are still those of the body.
    jaxpr = made.jaxpr.replace(debug_info=closed.jaxpr.debug_info)
    return made.replace(jaxpr=jaxpr), tuple(trace.loops.notes)


class _Plain(Retrace):
    def __init__(self, kernel: _jax.ClosedJaxpr, num_stages: int | None):
        self._kernel = kernel
        self.loops = ahead.Kernel(num_stages, choice.smem_bytes(kernel.jaxpr))

    @functools.cached_property
    def _written(self) -> dict[int, list[bool]]:
        return references.written_operands(self._kernel, self._is_staged)

    def _is_staged(self, eqn: _jax.JaxprEqn) -> bool:
        """Whether the loads of a loop may become copies ahead."""
        is_asked = eqn.primitive is staged_loop_p
        return is_asked or (self.loops.num_stages != 1 and choice.may_pay(eqn))

    def is_replaced(self, eqn: _jax.JaxprEqn) -> bool:
        name = eqn.primitive.name
        return (
            name in REPLACED
            or self._is_staged(eqn)
            or bool(eqn.params.get("branches_platforms"))
            or (name == "while" and _is_for_rows(eqn))
            or not all(_is_plain(x.aval) for x in (*eqn.invars, *eqn.outvars))
            or any(is_array(v.aval) for b in bodies(eqn) for v in b.jaxpr.constvars)
        )

    def bound(self, aval: Any, value: Any) -> Any:
        if keys.is_key(aval) and not isinstance(value, keys.Key):
            # A function in the body closes over keys, which are not traced.
            with jax.ensure_compile_time_eval():
                return keys.of_array(value)
        return no_elements.Empty.of(aval) if no_elements.is_empty(aval) else value

    def results(self, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any] | None:
        name, params, made = eqn.primitive.name, eqn.params, eqn.outvars
        if made and all(no_elements.is_empty(v.aval) for v in made) and not eqn.effects:
            return list(made)
        if name == "scan" and params["length"] == 0:
            n_consts, n_carry = _jax.scan_arity(params)
            return [*operands[n_consts:][:n_carry], *made[n_carry:]]
        if name == "platform_index":
            return [np.int32(_case_of(params["platforms"]))]
        if name == "reshard":
            return operands
        if params.get("branches_platforms"):
            case = _case_of(params["branches_platforms"])
            return self.run(params["branches"][case], operands[1:])
        if name in _jax.EXPANSIONS:
            expand = _jax.EXPANSIONS[name](eqn)
            closed, _ = _jax.trace(expand, [v.aval for v in eqn.invars])
            return self.run(closed, operands)
        if self._is_staged(eqn) and id(eqn) in self._written:
            written = self._written[id(eqn)]
            staged = ahead.results(self, eqn, operands, written, self.loops)
            if staged is not None:
                return staged
        if name in keys.OPERATIONS:
            arrays = operands if name == "random_wrap" else settled(operands)
            return [keys.OPERATIONS[name](params, *arrays)]
        if is_followed(eqn):
            return None
        of_keys = keys.results(self, eqn, operands)
        return no_elements.results(eqn, operands) if of_keys is None else of_keys

    def followed(self, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
        if eqn.primitive is warp_map_p:
            # Arrays in it travel through SMEM, also those of a function that it calls.
            inner, name = eqn.params["jaxpr"], eqn.params["axis_name"]
            warp.bind(lambda warp_id: self.run(inner, [*operands, warp_id]), name)
            return []
        if eqn.primitive.name == "while" and _is_for_rows(eqn):
            return self._while_of_rows(eqn, operands)
        return super().followed(eqn, operands)

    def _while_of_rows(self, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
        holds, body, initial = self.loop(eqn, operands)

        def step(carry: list[Any]) -> list[Any]:
            after, going = body(carry), holds(carry)
            # Rows for which the condition does not hold have left the loop.
            return [_chosen(going, x, y) for x, y in zip(after, carry, strict=True)]

        return lax.while_loop(lambda carry: jnp.any(holds(carry)), step, initial)


def _is_plain(aval: Any) -> bool:
    """Whether a type is neither that of keys nor one without elements."""
    if type(aval) is _jax.ShapedArray and isinstance(aval.dtype, np.dtype):
        return 0 not in aval.shape
    return not keys.is_key(aval) and not no_elements.is_empty(aval)


def is_array(aval: Any) -> bool:
    """True for an array with dimensions; false for scalars and references."""
    return bool(getattr(aval, "shape", ())) and not isinstance(aval, _jax.AbstractRef)


def _case_of(platforms: Sequence[Sequence[str] | None]) -> int:
    """Returns the index of the code for CUDA, or else of the default."""
    for i, names in enumerate(platforms):  # the default is the last one
        if names is None or "cuda" in names:
            return i
    raise errors.UnsupportedError(
        "lax.platform_dependent has no code for CUDA",
        expected="cuda=, or default=",
        got=", ".join(name for names in platforms for name in names or ()),
        hint="pass default=",
    )


def _is_for_rows(eqn: _jax.JaxprEqn) -> bool:
    """Whether a loop's condition is an array: one for each row of its carry."""
    return bool(eqn.params["cond_jaxpr"].out_avals[0].shape)


def _chosen(rows: Any, x: Any, y: Any) -> Any:
    """Selects from two values by their leading dimensions."""
    if isinstance(x, keys.Key):
        return keys.Key(_chosen(rows, x.high, y.high), _chosen(rows, x.low, y.low))
    if isinstance(x, no_elements.Empty):
        return x
    if not x.shape:
        return jnp.where(rows, x, y)
    dimensions = tuple(range(rows.ndim))
    return lax.select(lax.broadcast_in_dim(rows, x.shape, dimensions), x, y)
