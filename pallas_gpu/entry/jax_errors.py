# SPDX-License-Identifier: Apache-2.0
"""Errors that JAX raises while a body is traced, converted to ours."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import traceback
from collections.abc import Iterator

import jax

from pallas_gpu import errors, types
from pallas_gpu.checks.jax_operations import require_axis_name
from pallas_gpu.entry import scope

# What JAX says of a reference that it is given as an array, with the function's name.
_NOT_ARRAYS = (
    re.compile(r"(?P<f>\w+) requires ndarray or scalar arguments, got <class '.*Trace"),
    re.compile(r"Attempting to pass a Ref .* to a primitive: (?P<f>\w+)"),
    re.compile(r"(?P<f>TransformedRef)s cannot be abstractified"),
    re.compile(r"Argument '.*' of type '.*(?P<f>RefView)'> is not a valid JAX type"),
    re.compile(
        r".* (?P<f>__array__)\(\) was called on traced array with shape \w*Ref<"
    ),
)


@contextlib.contextmanager
def typed(mesh: types.Mesh) -> Iterator[None]:
    """Converts errors of JAX whose cause is known to ours, with the user's line."""
    try:
        yield
    except errors.PallasGpuError:
        raise
    except Exception as error:
        where = scope.raised_at(error)
        unbound = re.match(r"Found an unbound axis name: (\w+)", str(error))
        if unbound is not None and isinstance(error, NameError):
            require_axis_name(unbound[1], mesh, where)
        converted = (
            _foreign(error)
            or _reference(error)
            or carry(error)
            or _escaped(error)
            or next(filter(None, (row.converted(error) for row in _ROWS)), None)
        )
        if converted is None:
            raise
        raise converted.with_location(where) from None


def _foreign(error: Exception) -> errors.PallasGpuError | None:
    """A function of JAX's Pallas that the body called, and that raised."""
    frames = list(traceback.extract_tb(error.__traceback__))
    last = scope.innermost(frames)
    if last is None or last + 1 == len(frames):
        return None
    called = [frame for frame in frames[last + 1 :] if not _is_plumbing(frame)]
    if not called or not _is_in(called[0], "jax", "pallas"):
        return None
    return types.foreign_function(called[0].name)


def _is_plumbing(frame: traceback.FrameSummary) -> bool:
    """Wrappers of JAX between the user's line and the function that it calls."""
    return _is_in(frame, "jax") and not _is_in(frame, "pallas")


def _is_in(frame: traceback.FrameSummary, *folders: str) -> bool:
    return set(folders) <= set(pathlib.Path(frame.filename).parts)


def _reference(error: Exception) -> errors.PallasGpuError | None:
    """A reference as an array, as a Python value, or with an array's attribute."""
    for pattern in _NOT_ARRAYS:
        if (found := pattern.match(str(error))) is not None:
            named = re.fullmatch(r"[a-z]\w*", found["f"])
            called = found["f"] if named else "a function of arrays"
            return types.not_a_value(f"{called} is called on a reference")
    # JAX looks at its shape first.
    for frame, _ in traceback.walk_tb(error.__traceback__):
        what = types.conversion(frame.f_code.co_name)
        if what is not None and types.base_aval(frame.f_locals.get("self")) is not None:
            return types.not_a_value(what)
    if not isinstance(error, AttributeError) or types.base_aval(error.obj) is None:
        return None
    return errors.ArgumentTypeError(
        f"a reference has no attribute {error.name!r}",
        expected="shape, dtype, ndim, size, at, T, transpose, get, set or swap",
        got=error.name,
        hint="for those of arrays read it first: x_ref[...]",
    )


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


def _escaped(error: Exception) -> errors.PallasGpuError | None:
    """A value of a function that JAX has finished to trace."""
    if not isinstance(error, jax.errors.UnexpectedTracerError):
        return None
    made = re.search(r"with type (\S+) .*created on line (.*?\))", str(error), re.S)
    return escaped_value(f"{made[1]} of {made[2]}" if made else "a value of JAX")


def escaped_value(value: str, who: str = "") -> errors.KernelError:
    """Returns the error of a value that is used after its function has ended."""
    return errors.KernelError(
        f"{who}a value of a branch, a loop or another function is used outside of it",
        expected="values of the function that uses them",
        got=value,
        hint="return it: jax.lax.cond(condition, f, g), plgpu.loop(..., "
        "init_carry=...); or store it to a scratch reference and read that; what "
        "another kernel or a jitted function computes is an argument of this kernel",
    )


# --- errors that their text describes -------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Row:
    """An error of JAX, and what it becomes.

    Attributes:
      text: what its text starts with. The rows below are formatted with its groups.
      becomes: the class of ours.
      what, expected, got, hint: see `errors.PallasGpuError`.
      raised: its class.
      otherwise: what stands for a group that is absent.
    """

    text: str
    becomes: type[errors.PallasGpuError]
    what: str
    expected: str
    got: str
    hint: str
    raised: type[Exception] = Exception
    otherwise: str = ""

    def converted(self, error: Exception) -> errors.PallasGpuError | None:
        """Returns our error, None for an error of another row."""
        found = re.match(self.text, str(error), re.S)
        if found is None or not isinstance(error, self.raised):
            return None
        texts = (self.what, self.expected, self.got, self.hint)
        groups = found.groups(self.otherwise)
        what, expected, got, hint = (text.format(*groups) for text in texts)
        return self.becomes(what, expected=expected, got=got, hint=hint)


def _needed(raised: type[Exception], *rows: str, text: str = "") -> _Row:
    """The row of a value that is known only when the kernel runs; {0} is its type."""
    value = r"(?=(?:.*?traced array with shape (\S+?)\.?(?:\s|$))?)"
    what, expected, got, hint = rows
    return _Row(text or value + r"[^\n]*((?:\n[^\n]*)?)", errors.TracedValueError,
                what, expected, got, hint, raised, "a traced value")  # fmt: skip


_ROWS = (
    _Row(
        r"Cannot return `Ref`s from `(\w+)`",
        errors.KernelError,
        "{0}: a branch returns a reference",
        "values as results",
        "a reference",
        "return its contents, ref[...], or use the reference in the branches",
    ),
    # lax's arithmetic, also that of `x.at[i].add(y)`.
    _Row(
        r"(\w+) does not accept dtype bool at position",
        errors.DTypeError,
        "{0} has no meaning for bools",
        "integers or floats",
        "bool",
        "use | and &, and x.at[i].max(y) or x.at[i].min(y) in place of add or mul; or "
        "convert with x.astype(jnp.int32)",
    ),
    # `jax.vmap` of a function that indexes a reference.
    _Row(
        "Batching with multiple indexers|No support for vmapping over nontrivial|"
        "performing an? .* operation with vmapped value",
        errors.UnsupportedError,
        "jax.vmap inside a kernel reached an access to a reference",
        "vmap of pure computations inside a body",
        "a batched index, or a batched value that is stored",
        "read and store outside of the mapped function, ref[...] = jax.vmap(f)(x); an "
        "array of indices reads or stores several parts, ref[rows]; or write the loop "
        "with plgpu.loop",
    ),
    # `jax.ref.addupdate`; other stores are checked by this package.
    _Row(
        r"Invalid (\w+) for `addupdate`.*?Expected shape: (.*?)\. Value shape: (.*?)\. "
        "|"
        r"Invalid (\w+) for `addupdate`. Ref dtype: (\w+)\. Value shape: (\w+)",
        errors.ArgumentError,
        "addupdate: the value does not have the {0}{3} of the part of the reference",
        "{1}{4}",
        "{2}{5}",
        "ref[index] += value converts and broadcasts scalars",
        otherwise="",
    ),
    # What `lax.scan` or `lax.map` iterate over, a reference for instance.
    _Row(
        r"(\w+) got value with no leading axis to|no mapping handler for \w*Ref<",
        errors.ArgumentTypeError,
        "{0} over a value that has no leading axis",
        "arrays with a leading axis, all of one size",
        "a scalar or a reference",
        "read the reference, lax.scan(f, init, x_ref[...]), or read row i of it in a "
        "loop: plgpu.loop(0, n, init_carry=init), x_ref[i]",
        otherwise="scan",
    ),
    # Operands of equal rank, and others.
    _Row(
        r"(?:\w+ got i|I)ncompatible (?:shapes|types) for broadcasting: (?:shapes=)?"
        r"([^\n]*?)\.*(?:\n|$)",
        errors.ShapeError,
        "the shapes of an operation's operands do not match",
        "equal shapes, up to axes of size 1 and missing leading axes",
        "{0}",
        "x[:, None] adds an axis of size 1, and jnp.sum(x, axis=1, keepdims=True) "
        "keeps one; a reference has the shape of its block",
    ),
    _Row(
        r"dot_general requires contracting dimensions to have the same shape, got "
        r"([^\n]*)\.",
        errors.ShapeError,
        "a product of matrices whose inner dimensions differ",
        "(m, k) @ (k, n)",
        "inner dimensions {0}",
        "transpose an operand, a @ b.T, or check the blocks: a reference has the shape "
        "of its block",
    ),
    # One output, several of them, or another structure.
    _Row(
        r"(cond|switch) branch(?:es| outputs) must have .*?\n\n.*?\n\n\s*(?:\* )?"
        r"(.*?)[.;]?\n",
        errors.ArgumentTypeError,
        "{0}: the branches return values of different types",
        "the same structure, shapes and dtypes from each branch",
        "{1}",
        "convert with .astype, or jnp.broadcast_to; a branch without a value returns "
        "the old one",
    ),
    _Row(
        r"cond_fun must return a boolean scalar, but got \w+(?: type\(s\))? "
        r"(?:\[ShapedArray\()?(.*?)(?:\)\])?\.$|"
        r"Pred must be a scalar, got \w+\((.*?)\)",
        errors.ArgumentTypeError,
        "the condition of a branch or a loop is not a scalar bool",
        "a scalar bool: a warpgroup takes one way as a whole",
        "{0}{1}",
        "reduce it, jnp.any(x > 0), or compare the scalar, x > 0; jnp.where selects "
        "elements",
    ),
    _Row(
        r"cannot reshape array of shape (.*? \(size \d+\)) into shape (\([^)]*\))",
        errors.ShapeError,
        "an array is reshaped to another number of elements",
        "a shape of as many elements",
        "{0} to {1}",
        "check the blocks: a reference has the shape of its block",
    ),
    _Row(
        r"Cannot (concatenate|stack) arrays with [^\n]*?(?:for shapes|got) ([^\n]*)\.$",
        errors.ShapeError,
        "{0}: the shapes of the arrays do not match",
        "equal shapes, up to the axis along which arrays are concatenated",
        "{1}",
        "slice or pad the arrays; x[None] adds an axis",
    ),
    _Row(
        r"axis (-?\d+) is out of bounds for array of (\w+ [^\n]*)",
        errors.ArgumentError,
        "an array has fewer axes than a function is asked for",
        "an axis of the array: 0 to its dimension - 1, or negative from the last",
        "axis {0} of an array of {1}",
        "a reference has the shape of its block, without the dimensions that None "
        "squeezes",
    ),
    # `jax.reshard` or a constraint to axes of the mesh of `jax.set_mesh`.
    _Row(
        "Using PartitionSpec when you are not under a mesh|"
        "with_sharding_constraint requires a non-empty mesh",
        errors.UnsupportedError,
        "a value of a kernel is placed on a mesh",
        "values on the device that runs the kernel",
        "a PartitionSpec",
        "leave out jax.reshard in the body, and place the arguments and results of the "
        "kernel outside",
    ),
    _needed(
        jax.errors.TracerBoolConversionError,
        "Python needs a condition that is known only when the kernel runs",
        "a Python bool in if, while, and, or, not, assert",
        "{0}",
        "@plgpu.when(condition) for stores, jnp.where or jax.lax.cond for values, "
        "jax.lax.while_loop for loops; (a > 0) & (b < c), | and ~ for and, or and not",
    ),
    _needed(
        jax.errors.TracerIntegerConversionError,
        "Python needs an integer that is known only when the kernel runs",
        "a Python int in range(), as a size, or as an index of a list",
        "{0}",
        "plgpu.loop(0, n) or jax.lax.fori_loop for loops; an index of a reference or "
        "an array in place of one of a list; a Python int for a size, under jax.jit "
        "with static_argnums",
    ),
    _needed(
        jax.errors.TracerArrayConversionError,
        "NumPy needs an array that is known only when the kernel runs",
        "functions of jax.numpy on arrays of a kernel",
        "{0}",
        "write jnp in place of np",
    ),
    _needed(
        TypeError,
        "Python formats a value that is known only when the kernel runs",
        "a Python number in f-strings and str.format",
        "a traced array",
        'print it when the kernel runs: plgpu.debug_print("{{}}", x)',
        text=r".*Tracer\.__format__.*",
    ),
    _needed(
        jax.errors.ConcretizationTypeError,
        "Python needs a number that is known only when the kernel runs",
        "a Python number",
        "{0}{1}",
        "compute with the array itself, and show it with plgpu.debug_print; make sizes "
        "and bounds Python ints",
    ),
    _needed(
        jax.errors.NonConcreteBooleanIndexError,
        "an array is indexed with bools: the size of the result is known only when "
        "the kernel runs",
        "static shapes",
        "{0}",
        "jnp.where(mask, x, other) keeps the shape; to a reference plgpu.store(ref, "
        "(), x, mask=mask)",
        text=r"[^\n]*got ([^\n]*)",
    ),
    _needed(
        IndexError,
        "a slice of an array has bounds that are known only when the kernel runs",
        "a static size",
        "{0}",
        "jax.lax.dynamic_slice_in_dim(x, start, size), or read a part of the "
        "reference: ref[plgpu.ds(start, size)]",
        text=r".*must have static start/stop/step.*?Got (.*?)\. To index",
    ),
    _needed(
        TypeError,
        "the shape of an array is known only when the kernel runs",
        "Python ints",
        "{0}",
        "use the largest shape and a mask, or a loop over parts of one shape",
        text=r".*Shapes must be 1D sequences of[^\n]*?got ([^\n]*?)\.*(?:\n|$)",
    ),
)
