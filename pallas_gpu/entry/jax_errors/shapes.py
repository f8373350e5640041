# SPDX-License-Identifier: Apache-2.0
"""What JAX says of shapes that do not match, converted to errors of ours."""

from __future__ import annotations

import re

from pallas_gpu import errors

# Of operands of equal rank, and of others.
_BROADCAST = re.compile(
    r"(?:\w+ got i|I)ncompatible (?:shapes|types) for broadcasting: (?:shapes=)?(.*)"
)
_PRODUCT = re.compile(
    r"dot_general requires contracting dimensions to have the same shape, got (.*)\."
)


def mismatch(error: Exception) -> errors.ShapeError | None:
    """Returns the error for operands of an operation whose shapes do not match."""
    text = str(error)
    if (found := _BROADCAST.match(text)) is not None:
        return errors.ShapeError(
            "the shapes of an operation's operands do not match",
            expected="equal shapes, up to axes of size 1 and missing leading axes",
            got=found[1].rstrip("."),
            hint="x[:, None] adds an axis of size 1, and jnp.sum(x, axis=1, "
            "keepdims=True) keeps one; a reference has the shape of its block",
        )
    if (found := _PRODUCT.match(text)) is not None:
        return errors.ShapeError(
            "a product of matrices whose inner dimensions differ",
            expected="(m, k) @ (k, n)",
            got=f"inner dimensions {found[1]}",
            hint="transpose an operand, a @ b.T, or check the blocks: a reference has "
            "the shape of its block",
        )
    return None
