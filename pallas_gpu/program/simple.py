# SPDX-License-Identifier: Apache-2.0
"""What a program does not compute: what it has already, and trivial or unused indices.

JAX's loops, and code that indexes by hand, compute what is known or computed already;
functions that share no code compute the same elements. Each operation that a program
has is checked, analysed, assigned a layout and emitted, before LLVM removes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallas_gpu import _jax
from pallas_gpu.program.nodes import Constant, Operand, Value

# Operations of integers by their constants: of which operand one is the result.
_UNIT = {"add": 0, "sub": 0, "mul": 1, "div": 1}
_COMMUTES = ("add", "mul")
_ARITHMETIC = ("max", "min", "rem", "neg", "select_n", "convert_element_type")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
# Whoever writes it wants what depends on it to be computed again.
_APART = "optimization_barrier"
_SCALAR = frozenset({*_UNIT, *_ARITHMETIC, *_COMPARISONS, "axis_index"})


def needed(jaxpr: _jax.Jaxpr) -> list[_jax.JaxprEqn]:
    """Returns the equations of a jaxpr without arithmetic that nothing uses."""
    live = {x for x in jaxpr.outvars if not isinstance(x, _jax.Literal)}
    found = []
    for eqn in reversed(jaxpr.eqns):
        if not _is_scalar(eqn) or eqn.outvars[0] in live:
            found.append(eqn)
            live.update(x for x in eqn.invars if not isinstance(x, _jax.Literal))
    return found[::-1]


def key(eqn: _jax.JaxprEqn, ins: Sequence[Operand]) -> Any:
    """Returns what operations of one value have in common; None for other operations.

    Args:
      eqn: an operation that accesses no memory.
    """
    if eqn.primitive.name == _APART or (eqn.effects and not _is_scalar(eqn)):
        return None
    # The bytes: 0.0 and -0.0 are equal.
    operands = (
        x
        if isinstance(x, Value)
        else (x.dtype, x.value.tobytes() if x.shape == () else id(x.value))
        for x in ins
    )
    return eqn.primitive, *eqn.params.items(), *operands


def same(eqn: _jax.JaxprEqn, ins: Sequence[Operand]) -> Value | None:
    """Returns the operand that is the result of an operation of integers, if one is.

    What consists of constants alone stays an operation: an index that is dynamic to its
    author, who promises what tiles it starts at, does not become a static one.
    """
    name = eqn.primitive.name
    if name not in _UNIT or not _is_scalar(eqn):
        return None
    a, b = ins
    if isinstance(a, Constant) and name in _COMMUTES:
        a, b = b, a
    unit = isinstance(b, Constant) and b.value == _UNIT[name]
    return a if unit and isinstance(a, Value) else None


def _is_scalar(eqn: _jax.JaxprEqn) -> bool:
    if eqn.primitive.name not in _SCALAR:
        return False
    aval = eqn.outvars[0].aval
    return aval.shape == () and aval.dtype.kind in "iub"
