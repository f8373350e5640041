# SPDX-License-Identifier: Apache-2.0
"""Which error of ours stands for an error of JAX, by its class and its text."""

from __future__ import annotations

import contextlib
import pathlib
import re
import traceback
from collections.abc import Iterator

import jax

from pallas_gpu import errors, types
from pallas_gpu.entry import check, scope
from pallas_gpu.entry.jax_errors import shapes, traced_values

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
        _axis(error, mesh, where)
        converted = (
            _foreign(error)
            or _reference(error)
            or _conversion(error)
            or _attribute(error)
            or _escape(error)
            or _arithmetic_of_bools(error)
            or _leading_axis(error)
            or shapes.mismatch(error)
            or traced_values.carry(error)
            or _escaped(error)
            or _placement(error)
            or traced_values.needed(error)
        )
        if converted is None:
            raise
        raise converted.with_location(where) from None


def _axis(error: Exception, mesh: types.Mesh, where: str | None) -> None:
    unbound = re.match(r"Found an unbound axis name: (\w+)", str(error))
    if unbound is not None and isinstance(error, NameError):
        check.require_axis_name(unbound[1], mesh, where)


def _reference(error: Exception) -> errors.PallasGpuError | None:
    """A reference where JAX expects an array."""
    for pattern in _NOT_ARRAYS:
        if (found := pattern.match(str(error))) is not None:
            named = re.fullmatch(r"[a-z]\w*", found["f"])
            called = found["f"] if named else "a function of arrays"
            return types.not_a_value(f"{called} is called on a reference")
    return None


def _conversion(error: Exception) -> errors.PallasGpuError | None:
    """A reference that Python asks for a value: JAX looks at its shape first."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        what = types.conversion(frame.f_code.co_name)
        if what is not None and types.base_aval(frame.f_locals.get("self")) is not None:
            return types.not_a_value(what)
    return None


def _attribute(error: Exception) -> errors.PallasGpuError | None:
    """An attribute that a reference does not have."""
    if not isinstance(error, AttributeError) or types.base_aval(error.obj) is None:
        return None
    return errors.ArgumentTypeError(
        f"a reference has no attribute {error.name!r}",
        expected="shape, dtype, ndim, size, at, T, transpose, get, set or swap",
        got=error.name,
        hint="for those of arrays read it first: x_ref[...]",
    )


def _arithmetic_of_bools(error: Exception) -> errors.PallasGpuError | None:
    """lax's arithmetic, also that of `x.at[i].add(y)`, on bools."""
    refused = re.match(r"(\w+) does not accept dtype bool at position", str(error))
    if refused is None:
        return None
    return errors.DTypeError(
        f"{refused[1]} has no meaning for bools",
        expected="integers or floats",
        got="bool",
        hint="use | and &, and x.at[i].max(y) or x.at[i].min(y) in place of add or "
        "mul; or convert with x.astype(jnp.int32)",
    )


def _leading_axis(error: Exception) -> errors.PallasGpuError | None:
    """What `lax.scan` or `lax.map` iterate over, a reference for instance."""
    said = r"(\w+) got value with no leading axis to|no mapping handler for \w*Ref<"
    found = re.match(said, str(error))
    if found is None:
        return None
    return errors.ArgumentTypeError(
        f"{found[1] or 'scan'} over a value that has no leading axis",
        expected="arrays with a leading axis, all of one size",
        got="a scalar or a reference",
        hint="read the reference, lax.scan(f, init, x_ref[...]), or read row i of it "
        "in a loop: plgpu.loop(0, n, init_carry=init), x_ref[i]",
    )


def _escape(error: Exception) -> errors.PallasGpuError | None:
    """A reference as the result of a branch or a loop."""
    escaped = re.match(r"Cannot return `Ref`s from `(\w+)`", str(error))
    if escaped is None:
        return None
    return errors.KernelError(
        f"{escaped[1]}: a branch returns a reference",
        expected="values as results",
        got="a reference",
        hint="return its contents, ref[...], or use the reference in the branches",
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


def _placement(error: Exception) -> errors.PallasGpuError | None:
    """`jax.reshard` or a constraint to axes of the mesh of `jax.set_mesh`."""
    if not re.match(
        r"Using PartitionSpec when you are not under a mesh|"
        r"with_sharding_constraint requires a non-empty mesh",
        str(error),
    ):
        return None
    return errors.UnsupportedError(
        "a value of a kernel is placed on a mesh",
        expected="values on the device that runs the kernel",
        got="a PartitionSpec",
        hint="leave out jax.reshard in the body, and place the arguments and results "
        "of the kernel outside",
    )


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
