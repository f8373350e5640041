# SPDX-License-Identifier: Apache-2.0
"""What JAX says of values while a body is traced, converted to errors of ours."""

from __future__ import annotations

import re

import jax

from pallas_gpu import errors


def needed(error: Exception) -> errors.TracedValueError | None:
    """Returns the error for a value that is known only when the kernel runs."""
    text = str(error)
    for found in (_converted, _sized):
        rows = found(error, text)
        if rows is not None:
            what, expected, got, hint = rows
            return errors.TracedValueError(what, expected=expected, got=got, hint=hint)
    return None


def _converted(error: Exception, text: str) -> tuple[str, str, str, str] | None:
    """A value that becomes a Python or NumPy object."""
    named = re.search(r"traced array with shape (\S+?)\.?(\s|$)", text)
    value = named[1] if named else "a traced value"
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return (
            "Python needs a condition that is known only when the kernel runs",
            "a Python bool in if, while, and, or, not, assert",
            value,
            "@plgpu.when(condition) for stores, jnp.where or jax.lax.cond for values, "
            "jax.lax.while_loop for loops; (a > 0) & (b < c), | and ~ for and, or and "
            "not",
        )
    if isinstance(error, jax.errors.TracerIntegerConversionError):
        return (
            "Python needs an integer that is known only when the kernel runs",
            "a Python int in range(), as a size, or as an index of a list",
            value,
            "plgpu.loop(0, n) or jax.lax.fori_loop for loops; an index of a reference "
            "or an array in place of one of a list; a Python int for a size, under "
            "jax.jit with static_argnums",
        )
    if isinstance(error, jax.errors.TracerArrayConversionError):
        return (
            "NumPy needs an array that is known only when the kernel runs",
            "functions of jax.numpy on arrays of a kernel",
            value,
            "write jnp in place of np",
        )
    if isinstance(error, TypeError) and "Tracer.__format__" in text:
        return (
            "Python formats a value that is known only when the kernel runs",
            "a Python number in f-strings and str.format",
            text,
            'print it when the kernel runs: plgpu.debug_print("{}", x)',
        )
    if isinstance(error, jax.errors.ConcretizationTypeError):
        asked = text.splitlines()[1:2]
        return (
            "Python needs a number that is known only when the kernel runs",
            "a Python number",
            "\n".join([value, *asked]),
            "compute with the array itself, and show it with plgpu.debug_print; make "
            "sizes and bounds Python ints",
        )
    return None


def _sized(error: Exception, text: str) -> tuple[str, str, str, str] | None:
    """A value that decides the shape of an array."""
    if isinstance(error, jax.errors.NonConcreteBooleanIndexError):
        return (
            "an array is indexed with bools: the size of the result is known only "
            "when the kernel runs",
            "static shapes",
            text.splitlines()[0].rpartition("got ")[2],
            "jnp.where(mask, x, other) keeps the shape; to a reference "
            "plgpu.store(ref, (), x, mask=mask)",
        )
    if isinstance(error, IndexError) and "must have static start/stop/step" in text:
        return (
            "a slice of an array has bounds that are known only when the kernel runs",
            "a static size",
            text.partition("Got ")[2].partition(". To index")[0],
            "jax.lax.dynamic_slice_in_dim(x, start, size), or read a part of the "
            "reference: ref[plgpu.ds(start, size)]",
        )
    if isinstance(error, TypeError) and "Shapes must be 1D sequences of" in text:
        return (
            "the shape of an array is known only when the kernel runs",
            "Python ints",
            text.splitlines()[0].partition("got ")[2].rstrip("."),
            "use the largest shape and a mask, or a loop over parts of one shape",
        )
    return None


def carry(error: Exception) -> errors.KernelError | None:
    """Returns the error for a loop whose carry changes its structure or type."""
    differ = str(error).split("\n\n")[1:2]
    if "body function carry input" not in str(error) or not differ:
        return None
    got = " ".join(differ[0].split())
    hint = "convert the new carry, or the initial one, with .astype"
    if "shapes do not match" in got:
        hint = "start with an array of the carry's shape: jnp.zeros(shape, dtype)"
    elif any(x in got for x in ("Python types differ", "pytree", "tree structure")):
        hint = "return the new carry, all of it, at the end of the body"
    return errors.KernelError(
        "a loop's body returns another carry than it gets",
        expected="the structure, shapes and dtypes of the initial carry",
        got=got,
        hint=hint,
    )
