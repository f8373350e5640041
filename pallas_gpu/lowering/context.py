# SPDX-License-Identifier: Apache-2.0
"""The context of a lowering rule, and the loop over equations."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu import _jax, arch, errors, resources, types
from pallas_gpu.entry.call import CallParams
from pallas_gpu.entry.memory.unions import inferred_members
from pallas_gpu.layouts.window import Sum, Window
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.machine import State
from pallas_gpu.lowering.semantics import protocol
from pallas_gpu.lowering.traits import Traits
from pallas_gpu.mosaic import elementwise, mbarrier
from pallas_gpu.mosaic import module as mosaic_module
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes, scalars
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry

I32 = np.dtype(np.int32)


@dataclasses.dataclass
class KernelState:
    """The state of a kernel while it is lowered.

    Attributes:
      params: parameters of the call.
      target: the target of the compilation.
      builder: the open module.
      plan: allocation of SMEM, TMEM and barriers.
      state: register state that loops and branches carry: parity bits of each barrier
        declaration (a scalar i32), and live accumulators (arrays).
      settled: values of accumulators that no product under way adds to, by their keys.
      smem_top_bytes: top of the stack of SMEM arrays: of the block, or of the warp that
        executes the code.
      tmem_top_columns: likewise of arrays in TMEM.
      tmem: the TMEM of the block, if it has any: an `Allocation` under Lane semantics,
        a memref of all columns under Warpgroup semantics until it is expanded.
      axes: index of each named axis, emitted once in the prologue.
      trial: the block of a trial, which only determines layouts and is erased; None
        while code is emitted.
      where: returns the line of the equation that is lowered, or the operation that is
        expanded.
    """

    params: CallParams
    target: arch.GpuTarget
    builder: mosaic_module.KernelBuilder
    plan: resources.Plan
    state: dict[Any, Any]
    settled: dict[Any, Any] = dataclasses.field(default_factory=dict)
    smem_top_bytes: int = 0
    tmem_top_columns: int = 0
    tmem: Any = None
    axes: dict[Any, ir.Value] = dataclasses.field(default_factory=dict)
    trial: ir.Block | None = None
    where: Callable[[], str | None] = lambda: None

    @functools.cached_property
    def traits(self) -> Traits:
        """What holds of the kernel as a whole."""
        return Traits.of(self.params.jaxpr)

    @functools.cached_property
    def inferred_members(self) -> frozenset[Any]:
        """The members of unions whose layout in SMEM is inferred, as variables."""
        semantics = self.params.compiler_params.lowering_semantics
        return inferred_members(self.params.jaxpr, semantics)

    @functools.cached_property
    def semantics(self) -> protocol.Semantics:
        """The call's semantics."""
        return protocol.of(self.params.compiler_params.lowering_semantics)

    @property
    def keeps_lines(self) -> bool:
        """Whether operations carry the lines of their equations."""
        return self.semantics.keeps_lines or self.params.compiler_params.line_info

    @property
    def rules(self) -> Mapping[Any, Callable[..., Any]]:
        """The rule of each primitive under the kernel's semantics."""
        return registry.rules(self.semantics.rule_kind)

    def constant(self, value: Any, dtype: Any) -> Any:
        """Returns a scalar that is known in advance."""
        return vals.constant(value, dtype)

    def no_rule(self, eqn: _jax.JaxprEqn) -> errors.PallasGpuError:
        """Returns the error for a primitive without a rule."""
        return no_rule(self, eqn)


@dataclasses.dataclass(frozen=True)
class RuleContext:
    """The context of one equation: kernel, equation, and the variables read later."""

    kernel: KernelState
    eqn: _jax.JaxprEqn
    read: frozenset[Any] = frozenset()

    @property
    def builder(self) -> mosaic_module.KernelBuilder:
        """The open module."""
        return self.kernel.builder

    @property
    def issuer(self) -> mosaic_module.Issuer:
        """The threads that execute the equation: a warpgroup, or a single warp."""
        return self.builder.issuer

    @property
    def out_aval(self) -> Any:
        """Type of the single result."""
        return self.eqn.outvars[0].aval

    @property
    def approx_math(self) -> bool:
        """Whether fast approximations are allowed."""
        return self.kernel.params.compiler_params.approx_math

    @property
    def result_is_read(self) -> bool:
        """Whether anything reads the single result."""
        return self.eqn.outvars[0] in self.read

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Orders a store in the body with the accesses of the warpgroup's warps."""
        automatic = not self.kernel.params.compiler_params.unsafe_no_auto_barriers
        if automatic:
            # Another warp may still read what the store overwrites.
            mbarrier.synchronize()
        yield
        if automatic:
            mbarrier.synchronize()

    def part(self, operand: ops.RefOperand) -> Any:
        """Returns the part of a reference that an operand names.

        A view of the emitters under Lane semantics, a memref under Warpgroup semantics.
        """
        return self.kernel.semantics.part(self, operand.ref, operand.transforms)

    def operands(self, invals: Sequence[Any]) -> Any:
        """Returns the operand pytree of a primitive of ours."""
        return ops.unflatten(self.eqn.params["tree"], list(map(index_value, invals)))


def index_value(value: Any) -> Any:
    """Returns a constant index as a Python number, so that it is static in views."""
    if vals.is_scalar(value) and dtypes.is_constant(value.value):
        attribute = value.value.owner.attributes["value"]
        if isinstance(attribute, ir.IntegerAttr):
            # An attribute holds the bits regardless of the sign.
            number = np.array(attribute.value).astype(value.dtype)
            return number.item()
    return value


def i32(value: Any) -> ir.Value | int:
    """Returns an index as an i32 value, or as a Python number."""
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, regs.Splat):
        return vals.scalar_value(elementwise.astype(value, I32))
    return value


def add_indices(a: Any, b: Any) -> ir.Value | int:
    """Adds two indices, numbers or values."""
    builder = mosaic_module.current()
    a, b = i32(a), i32(b)
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if a == 0 or b == 0:
        return b if a == 0 else a
    left = builder.i32(a) if isinstance(a, int) else a
    right = builder.i32(b) if isinstance(b, int) else b
    return arith.addi(left, right)


def starts(window: Window) -> tuple[Any, ...]:
    """Returns the starts of a window as i32 values and Python numbers."""
    return tuple(
        i32(s.total(add_indices)) if isinstance(s, Sum) else s for s in window.starts
    )


def part_window(handle: vals.MemoryHandle, transforms: Any) -> Window:
    """Returns the window of a part of a reference, in the handle's array.

    Dynamic starts are i32 values; their known multiples are derived from the code that
    computes them.
    """
    window = types.resolve(handle.window, transforms)
    origin = starts(window)
    return window.at(origin, [scalars.divisor(start) for start in origin])


def part_dtype(handle: vals.MemoryHandle, transforms: Any) -> np.dtype:
    """Returns the type of the elements of a part of a reference."""
    step = types.reinterpreted(transforms)
    if step is None or step.dtype is None:
        return handle.dtype
    return dtypes.memory_dtype(step.dtype)


def tmem_window(handle: vals.TmemHandle, transforms: Any) -> Window:
    """Returns the window of a part of a reference in TMEM, in its rows and columns.

    The dimensions before the last two are spread over the columns.
    """
    window = types.resolve(handle.ref_shape, transforms)
    *lead, row, column = starts(window)
    *sizes, rows, columns = handle.ref_shape
    index: Any = 0
    for start, size in zip(lead, sizes, strict=True):
        index = add_indices(_scaled(index, size), start)
    first = add_indices(_scaled(index, columns), column)
    whole = Window.whole((rows, math.prod(sizes) * columns))
    return whole.slice(
        (row, first), window.sizes[-2:], (0, scalars.divisor(first)), add=add_indices
    )


def _scaled(index: Any, factor: int) -> Any:
    if isinstance(index, int):
        return index * factor
    return arith.muli(index, mosaic_module.current().i32(factor))


# --- the equation loop ----------------------------------------------------------------


def lower_jaxpr(
    kernel: Any,
    jaxpr: _jax.Jaxpr,
    args: Sequence[Any],
    consts: Sequence[Any] = (),
) -> list[Any]:
    """Lowers the equations of a jaxpr in order; returns its results.

    Args:
      kernel: the state of the machine, a `machine.State`.
      args: values of the jaxpr's arguments.
      consts: scalars that it closes over, as JAX or NumPy arrays of shape ().
    """
    env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = _scalar(kernel, const, var.aval)

    def read(atom: Any) -> Any:
        if isinstance(atom, _jax.Literal):
            return _scalar(kernel, atom.val, atom.aval)
        return env[atom]

    used = frozenset(
        v
        for atoms in (*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars)
        for v in atoms
        if not isinstance(v, _jax.Literal)
    )
    rules = kernel.rules
    keeps_lines = kernel.keeps_lines
    around = ir.Location.current or ir.Location.unknown()
    caller = kernel.where
    for eqn in jaxpr.eqns:
        rule = rules.get(eqn.primitive)
        if rule is None:
            raise kernel.no_rule(eqn).with_location(_jax.where(eqn))
        # Calls of JAX's functions have no lines inside.
        kernel.where = lambda eqn=eqn: _jax.where(eqn) or caller()
        try:
            with _location(eqn, around) if keeps_lines else around:
                ctx = RuleContext(kernel, eqn, used)
                results = rule(ctx, *map(read, eqn.invars))
        except errors.PallasGpuError as error:
            raise error.with_location(_jax.where(eqn)) from None
        if not eqn.primitive.multiple_results:
            results = [results]
        for var, result in zip(eqn.outvars, results, strict=True):
            env[var] = result
    kernel.where = caller
    return [read(v) for v in jaxpr.outvars]


def _scalar(kernel: State, constant: Any, aval: Any) -> Any:
    value = np.asarray(constant)
    if value.shape:
        raise errors.InternalError(f"an array constant of shape {value.shape}")
    return kernel.constant(value.item(), vals.numpy_dtype(aval))


def _location(eqn: _jax.JaxprEqn, around: ir.Location) -> ir.Location:
    place = _jax.file_and_line(eqn)
    return around if place is None else ir.Location.file(place[0], place[1], 0)


def no_rule(kernel: KernelState, eqn: _jax.JaxprEqn) -> errors.PallasGpuError:
    """Returns the error for a primitive without a rule."""
    name = eqn.primitive.name
    semantics = kernel.params.compiler_params.lowering_semantics.name
    gap = registry.KNOWN_GAPS.get((name, kernel.semantics.rule_kind))
    return errors.UnsupportedError(
        f"{name} is not supported under {semantics} semantics on {kernel.target.name}",
        got=gap,
        hint="see docs/coverage.md for what each semantics supports",
        where=_jax.where(eqn),
    )


def state_keys(kernel: KernelState, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Returns the register state that a body, closed or not, may use.

    These are the barriers and accumulators among its arguments, and the barriers that
    its scopes declare: a barrier's phase outlives its scope. An accumulator does not.
    """
    stateful = vals.BarrierHandle | vals.AccumulatorHandle
    keys = {key for a in args if isinstance(a, stateful) for key in a.keys}
    in_warp = kernel.builder.issuer == "warp"
    for scope in resources.scopes(jaxpr):
        for key, aval in resources.barriers_of(scope, in_warp):
            keys.update(aval.barrier.parity_keys(kernel.plan.barrier_slots[key]))
    return [key for key in kernel.state if key in keys]


# --- positions ------------------------------------------------------------------------


def emit_axes(kernel: KernelState) -> None:
    """Splits the linear block index into the grid's and the batch's axes.

    All axes are mapped to CUDA's x axis, whose limit is 2**31 - 1. The last axis varies
    fastest; the cluster's axes are the last, so that a cluster consists of consecutive
    blocks.
    """
    mesh = kernel.params.mesh
    batch = [(("batch", i), axis.size) for i, axis in enumerate(kernel.params.batch)]
    named = zip(mesh.grid_names, mesh.grid, strict=True)
    cluster = zip(mesh.cluster_names, mesh.cluster, strict=True)
    axes = [*batch, *named, *cluster]
    builder = kernel.builder
    rest = builder.threads.block_id[0]
    for i, (name, size) in reversed(list(enumerate(axes))):
        outermost = math.prod(n for _, n in axes[:i]) == 1
        if size == 1:
            kernel.axes[name] = builder.i32(0)
        elif outermost:
            kernel.axes[name] = rest
        else:
            kernel.axes[name] = arith.remui(rest, builder.i32(size))
            rest = arith.divui(rest, builder.i32(size))
    if mesh.thread_name is not None:
        kernel.axes[mesh.thread_name] = builder.threads.warpgroup


def total_blocks(params: CallParams) -> int:
    """Returns the number of blocks of a launch, batch axes included."""
    return params.mesh.blocks * math.prod(axis.size for axis in params.batch)


def unflatten_transforms(tree: Any, leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the steps of JAX's get and swap with static indices as numbers."""
    return jax.tree.unflatten(tree, list(map(index_value, leaves)))
