# SPDX-License-Identifier: Apache-2.0
"""From a Python body to a checked jaxpr over references."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors, types
from pallas_gpu.checks import equations, mbarrier, references
from pallas_gpu.entry import (
    call,
    jax_errors,
    mutable,
    plain,
    scope,
)
from pallas_gpu.primitives.grids.griddepcontrol import check_dependencies
from pallas_gpu.program import bodies
from pallas_gpu.program.bodies import line_of_use
from pallas_gpu.program.rewrite import Retrace
from pallas_gpu.program.walk import walk

# Small arrays that a body closes over are tables, coefficients, literals of jnp.array:
# the body reads them at its start, so each thread has them in its registers. These are
# 32 registers of a thread for 32-bit elements; more is a mistake rather than a table.
_MAX_ELEMENTS = 4096


# A call, whose `interpret` is not known yet, and its inputs behind the arguments.
Traced = tuple[call.CallParams, tuple[Any, ...]]


def gmem(aval: Any) -> types.KernelRef:
    """Returns a fresh reference to an array in GMEM."""
    return types.KernelRef(_jax.ShapedArray(tuple(aval.shape), aval.dtype), types.GMEM)


_RETURNED = "store results to the output references: out_ref[...] = value"


@scope.without_collections()
def trace_body(
    body: Callable[..., Any],
    arrays: Arrays,
    mesh: types.Mesh,
    name: str,
    params: types.CompilerParams = types.CompilerParams(),  # noqa: B008
    writes_inputs: bool = False,
) -> Traced:
    """Traces `body(*input_refs, *output_refs)` and checks the result.

    Returns:
      The call; the values that the body closes over and the positions around the call,
      which are inputs too: a scalar is one of shape (1,), an array itself, a `jax.Ref`
      one of its contents.
    """
    with scope.tracing(mesh), scope.locating(body):
        equations.require_element_types(arrays.avals)
        equations.require_indexable(arrays.avals)
        who = f"kernel {name}"
        closed, notes = arrays.traced(
            body, mesh, who, gmem, _RETURNED, params.num_stages
        )
        captured = _captured(closed, name)
        devices = _devices(closed.jaxpr, mesh)
        around = _enclosing_axes(closed.jaxpr, mesh, devices)
        positions = [jax.lax.axis_index(axis) for axis in around]
        closed, arrays = _arranged(closed, arrays, captured, positions, mesh)
        n_before = len(arrays.inputs) - len(positions)
        enclosing = tuple(
            call.EnclosingAxis(axis, size, n_before + i)
            for i, (axis, size) in enumerate(around.items())
        )
        equations.check_jaxpr(closed.jaxpr, mesh)
        if not writes_inputs:
            references.check_inputs(closed.jaxpr, len(arrays.inputs))
        mbarrier.check_waits(closed.jaxpr)
        check_dependencies(walk(closed.jaxpr), [axis.name for axis in enclosing])
    made = arrays.call(closed.jaxpr, mesh, name, params)
    made = dataclasses.replace(
        made, enclosing=enclosing, devices=devices, not_ahead=notes
    )
    return made, (*captured, *positions)


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrays of a body that is being traced.

    Attributes:
      inputs, outputs: their types. The outputs end with one for each `jax.Ref`, in the
        order of the inputs.
      declared: number of outputs without these.
      aliases: pairs (input, output) that are one array, those of `jax.Ref` last; the
        body gets its reference for both.
      sources: for each input the `jax.Ref` whose contents it is, else None.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    declared: int
    aliases: tuple[tuple[int, int], ...]
    sources: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        aliases: Sequence[tuple[int, int]] = (),
        sources: Sequence[Any] = (),
    ) -> Arrays:
        arrays = cls((), tuple(outputs), len(outputs), tuple(aliases), ())
        sources = sources or [None] * len(inputs)
        for aval, source in zip(inputs, sources, strict=True):
            arrays = arrays.with_input(aval, source)
        return arrays

    def with_input(self, aval: Any, source: Any = None) -> Arrays:
        """Returns the arrays and another one, the contents of `source` if given."""
        inputs, sources = (*self.inputs, aval), (*self.sources, source)
        outputs, aliases = self.outputs, self.aliases
        if source is not None and not any(source is x for x in self.sources):
            outputs = (*outputs, aval)
            aliases = (*aliases, (len(self.inputs), len(self.outputs)))
        return Arrays(inputs, outputs, self.declared, aliases, sources)

    @property
    def avals(self) -> tuple[Any, ...]:
        """The types of the inputs, then those of the outputs."""
        return (*self.inputs, *self.outputs)

    def call(
        self, jaxpr: _jax.Jaxpr, mesh: Any, name: str, params: Any
    ) -> call.CallParams:
        """Returns a call of a body over references to these arrays."""
        return call.CallParams(
            jaxpr, mesh, (), self.outputs, params, None, name, self.aliases
        )

    def split(self, refs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the references of inputs and outputs, one for what is one array."""
        n_in = len(self.inputs)
        inputs, outputs = list(refs[:n_in]), list(refs[n_in:])
        for i, j in self.aliases:
            inputs[i] = outputs[j]
        for i, source in enumerate(self.sources):
            if source is not None:
                first = next(k for k, x in enumerate(self.sources) if x is source)
                inputs[i] = inputs[first]
        return inputs, outputs

    def traced(
        self,
        body: Callable[..., Any],
        mesh: Any,
        who: str,
        ref: Callable[[Any], Any],
        returned: str,
        num_stages: int | None,
    ) -> tuple[_jax.ClosedJaxpr, tuple[tuple[str, str], ...]]:
        """Returns a body over references to all arrays, and what `plain` notes.

        Args:
          body: `body(*input_refs, *output_refs)`.
          mesh: the kernel's.
          who: the kernel, for messages.
          ref: returns a fresh reference to an array of a type.
          returned: what to do with results in place of returning them.
          num_stages: of its loops: see `CompilerParams`.
        """

        @functools.wraps(body)
        def flat(*refs: Any) -> None:
            inputs, outputs = self.split(refs)
            result = body(*inputs, *outputs[: self.declared])
            scope.require_none(who, body, result, returned)

        with jax_errors.typed(mesh):
            closed, _ = _jax.trace(flat, [*map(ref, self.avals)], mesh.axes)
            scope.require_applied()
            return plain.plain(closed, mesh, num_stages)


def _captured(closed: _jax.ClosedJaxpr, name: str) -> list[Any]:
    """Returns the scalars, small arrays and references that a body closes over."""
    for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        declared = "scratch_types (pallas_call: scratch_shapes)"
        refuse_reference(var, closed.jaxpr, name, declared)
        made_at = _jax.escaped_from(value)
        if made_at is not None:
            raise jax_errors.escaped_value(
                f"{var.aval.str_short()} of {made_at}", f"kernel {name}: "
            ).with_location(line_of_use(closed.jaxpr, var))
        if plain.is_array(var.aval) and var.aval.size > _MAX_ELEMENTS:
            raise errors.ClosureError(
                f"kernel {name}: the body uses an array from the enclosing function",
                expected="arrays as arguments; only scalars and arrays of at most "
                f"{_MAX_ELEMENTS} elements may be closed over",
                got=f"{var.aval.dtype}{list(var.aval.shape)}",
                hint="pass the array as an argument and read its reference",
                where=line_of_use(closed.jaxpr, var),
            )
    return list(closed.consts)


def refuse_reference(var: Any, jaxpr: _jax.Jaxpr, name: str, declared: str) -> None:
    """Raises KernelError for a reference of a scope that a body closes over."""
    if isinstance(var.aval, types.refs.IndexableRef):
        raise errors.KernelError(
            f"kernel {name}: a reference is used outside its scope",
            expected="references that the kernel or run_scoped passes to its body",
            got=types.describe(var.aval),
            hint=f"use it in the function that gets it, or declare it in {declared}",
            where=line_of_use(jaxpr, var),
        )


def _devices(jaxpr: _jax.Jaxpr, mesh: types.Mesh) -> types.Devices | None:
    """Returns the devices around a body that accesses the memory of others."""
    if all(x.owner is None for site in walk(jaxpr) for x in site.op.accesses):
        return None
    devices = types.Devices.around("the kernel")
    both = [name for name, _ in mesh.axes if name in devices.names]
    if both:
        raise errors.AxisNameError(
            f"the axis {both[0]!r} is one of the kernel and one of the mesh of devices",
            expected="different names",
            got=f"{tuple(name for name, _ in mesh.axes)} and {devices.names}",
            hint="rename the kernel's axis",
        )
    return devices


def _enclosing_axes(
    jaxpr: _jax.Jaxpr, mesh: types.Mesh, devices: types.Devices | None
) -> dict[Any, int]:
    """Returns the axes around the call whose positions a body asks for, with sizes.

    Without those of devices whose memory it accesses: it knows its own device.
    """
    known, own = _jax.enclosing_axes(), [name for name, _ in mesh.axes]
    own += [] if devices is None else devices.names
    named = (
        eqn.params["axis_name"]
        for eqn in bodies.equations(jaxpr)
        if eqn.primitive is jax.lax.axis_index_p
    )
    return {axis: known[axis] for axis in named if axis in known and axis not in own}


def _arranged(
    closed: _jax.ClosedJaxpr,
    arrays: Arrays,
    captured: Sequence[Any],
    positions: Sequence[Any],
    mesh: types.Mesh,
) -> tuple[_jax.ClosedJaxpr, Arrays]:
    """Makes inputs of what a body closes over, and of positions around the call.

    The body reads values from their inputs; that of a scalar has shape (1,). Of the
    `jax.Ref`s only those that it writes are outputs too.
    """
    jaxpr, n_in, declared = closed.jaxpr, len(arrays.inputs), arrays.declared
    # The inputs of which an output is the reference, in the order of the outputs.
    updated = [i for i, j in arrays.aliases if j >= declared]
    refs = [arrays.sources[i] for i in updated]
    if not captured and not positions and not updated:
        return closed, arrays
    own = zip([*jaxpr.invars[n_in + declared :], *jaxpr.constvars], [*refs, *captured],
              strict=True)  # fmt: skip
    written = references.written(jaxpr)
    kept = {id(source) for var, source in own if var in written}
    if not captured and not positions and all(id(ref) in kept for ref in refs):
        return closed, arrays

    def source_of(x: Any) -> Any:
        return x if id(x) in kept else None

    new = Arrays.of(
        arrays.inputs,
        arrays.outputs[:declared],
        arrays.aliases[: len(arrays.aliases) - len(updated)],
        [*map(source_of, arrays.sources)],
    )
    for value, var in zip(captured, jaxpr.constvars, strict=True):
        shape = var.aval.shape if _is_ref(var) else var.aval.shape or (1,)
        aval = _jax.ShapedArray(shape, var.aval.dtype)
        new = new.with_input(aval, source_of(value))
    for _ in positions:
        new = new.with_input(_jax.ShapedArray((1,), jnp.dtype(jnp.int32)))

    def again(*refs):
        inputs, outputs = new.split(refs)
        consts = [
            ref if _is_ref(var) else ref[...] if var.aval.shape else ref[0]
            for var, ref in zip(jaxpr.constvars, inputs[n_in:], strict=False)
        ]
        outputs = [*outputs[:declared], *(inputs[i] for i in updated)]
        # A `jax.Ref` is a reference in GMEM here, also in loops and branches.
        Retrace().run(jaxpr, [*inputs[:n_in], *outputs], consts)

    return _jax.trace(again, [*map(gmem, new.avals)], mesh.axes)[0], new


def _is_ref(var: Any) -> bool:
    return isinstance(var.aval, _jax.AbstractRef)


def lifted_operands(captured: Sequence[Any]) -> list[Any]:
    """Returns captured values as operands: scalars as arrays of shape (1,)."""
    return [
        x[...] if mutable.is_mutable(x) else jnp.reshape(x, jnp.shape(x) or (1,))
        for x in captured
    ]
