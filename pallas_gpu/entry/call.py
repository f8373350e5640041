# SPDX-License-Identifier: Apache-2.0
"""The kernel primitive: one launch, as an operation of JAX.

Everything that affects compilation is a parameter of the primitive, because JAX's cache
keys contain nothing else. `jax.vmap` adds a batch axis to the parameters: it is another
grid axis, and the leading index of each batched operand is applied where the launch
binds operands to references. The body stays the same but for copies of arrays whose
instances TMA cannot address (`memory/instances.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors, types
from pallas_gpu.entry import interpret as interpret_mode
from pallas_gpu.entry import placement, scope
from pallas_gpu.memory.instances import for_instances
from pallas_gpu.memory.workspace import WorkArray, work_arrays
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.grids import scheduling
from pallas_gpu.program.walk import uses, walk

kernel_p = _jax.Primitive("pallas_gpu_kernel")
kernel_p.multiple_results = True
_jax.lowers_with_devices(kernel_p)


@dataclasses.dataclass(frozen=True)
class BatchAxis:
    """One level of `jax.vmap` around a kernel.

    Attributes:
      size: number of instances.
      batched: for each input, whether it has a leading axis for this level.
    """

    size: int
    batched: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class EnclosingAxis:
    """An axis around the call, of `jax.shard_map` or `jax.vmap`, that the body names.

    Attributes:
      name: name of the axis.
      operand: the input that contains the position on it, an int32 of shape (1,).
    """

    name: Any
    size: int
    operand: int


@dataclasses.dataclass(frozen=True)
class CallParams:
    """The parameters of the kernel primitive, by name.

    Attributes:
      jaxpr: the body over references, inputs first, then outputs; no consts.
      mesh: grid, cluster, warpgroups.
      batch: levels of vmap, outermost first.
      out_avals: shapes and dtypes of the results, batch axes included.
      compiler_params: parameters of compilation.
      interpret: InterpretParams: the emulator; None: the emulator on CPU only; False:
        never the emulator.
      name: name of the kernel.
      aliases: pairs (operand, result) that are one array: the operand is its initial
        contents. The body uses the result's reference.
      enclosing: axes around the call on which the body asks for its position.
      devices: the mesh of devices around the call, if the body accesses the memory of
        others; on its axes the body asks for its position, too. None: it does not.
      not_ahead: lines of loads that a loop does not copy ahead, and why.
    """

    jaxpr: _jax.Jaxpr
    mesh: types.Mesh
    batch: tuple[BatchAxis, ...]
    out_avals: tuple[_jax.ShapedArray, ...]
    compiler_params: types.CompilerParams
    interpret: types.InterpretParams | bool | None
    name: str
    aliases: tuple[tuple[int, int], ...] = ()
    enclosing: tuple[EnclosingAxis, ...] = ()
    devices: types.Devices | None = None
    not_ahead: tuple[tuple[str, str], ...] = ()

    def with_body(self, jaxpr: _jax.Jaxpr) -> CallParams:
        """Returns the parameters with another body."""
        return self if jaxpr is self.jaxpr else dataclasses.replace(self, jaxpr=jaxpr)

    def as_dict(self) -> dict[str, Any]:
        """Returns the parameters as keyword arguments of the primitive."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @property
    def defined_at(self) -> str | None:
        """`file:line (name)` of the body, else of its first equation that has one."""
        source = scope.traced_at(self.jaxpr)
        lines = (site.where for site in walk(self.jaxpr))
        return source or next((line for line in lines if line is not None), None)

    @property
    def num_inputs(self) -> int:
        """Number of array operands."""
        return len(self.jaxpr.invars) - len(self.out_avals)

    @functools.cached_property
    def workspace(self) -> tuple[WorkArray, ...]:
        """The arrays in GMEM that the launch adds, those with initial contents first.

        They are results behind the outputs. Those with initial contents are operands
        behind the inputs too, in the same order.
        """
        return work_arrays(self.jaxpr)

    @property
    def work_results(self) -> list[_jax.ShapedArray]:
        """Types of the results that the launch adds."""
        return [
            _jax.ShapedArray((*self.lead(work), *work.array.shape), work.array.dtype)
            for work in self.workspace
        ]

    @property
    def work_operands(self) -> list[tuple[_jax.ShapedArray, Any]]:
        """Types of the operands that the launch adds, and what they are filled with."""
        typed = zip(self.work_results, self.workspace, strict=True)
        return [
            (aval, work.array.initial)
            for aval, work in typed
            if work.array.initial is not None
        ]

    def lead(self, work: WorkArray) -> tuple[int, ...]:
        """Returns the sizes of the axes in front of an array that the launch adds."""
        sharing, batch = work.array.sharing, tuple(axis.size for axis in self.batch)
        if sharing is types.Sharing.LAUNCH:
            return ()
        if sharing is types.Sharing.INSTANCE:
            return batch
        return (*batch, *self.mesh.grid, *self.mesh.cluster)

    @property
    def is_dynamic(self) -> bool:
        """Whether the kernel schedules its clusters dynamically."""
        return uses(self.jaxpr, scheduling.claim_p)

    @property
    def is_observable(self) -> bool:
        """Whether the launch must take place even if none of its results is used."""
        return is_observable(self.jaxpr)


def is_observable(jaxpr: _jax.Jaxpr) -> bool:
    """Whether a body must run even if none of its results is used."""
    found = (registry.operation(site.eqn.primitive) for site in walk(jaxpr))
    return any(operation is not None and operation.observable for operation in found)


@kernel_p.def_effectful_abstract_eval
def _kernel_types(*operands, jaxpr, out_avals, name, **__):
    placement.require_whole_types(name, operands)
    # JAX keeps an operation with this effect, and does not order it.
    effects = {_jax.FfiEffect()} if is_observable(jaxpr) else set()
    return _jax.results_vary_with(operands, out_avals), effects


def _axes(params: dict[str, Any]) -> Sequence[tuple[str, int]]:
    around = [(axis.name, axis.size) for axis in params["enclosing"]]
    devices = () if params["devices"] is None else params["devices"].axes
    return [*devices, *around, *params["mesh"].axes]


_jax.check_types_under_axes(kernel_p, _axes)


def resolve_interpret(interpret: Any) -> types.InterpretParams | bool | None:
    """Returns the parameter for `interpret`, PALLAS_GPU_INTERPRET and a forced mode."""
    if (forced := interpret_mode.forced(interpret)) is not None:
        return forced
    variable = os.environ.get("PALLAS_GPU_INTERPRET", "0")
    if interpret is None and variable != "0":
        interpret = "emitted" if variable == "emitted" else True
    if interpret == "emitted":
        return types.InterpretParams(emitted=True)
    return types.InterpretParams() if interpret is True else interpret


# --- what stands above ----------------------------------------------------------------


class Above:
    """What rooms above do with kernels; each enters its own when it is imported.

    It is imported when what it enters is first needed (`registry.registered_by`).

    Attributes:
      cpu_lowering: the MLIR lowering of the primitive on the CPU.
      cuda_lowering: that on NVIDIA GPUs.
      emulator_lowering: that of the emulator, which both may use.
      compiler: lowers a kernel for a target, or raises: `lower(params, target)`.
      eager_emulator: the emulator of eager calls, `run(params, arrays) -> arrays`. It
        runs without a callback, so that its errors reach the caller unwrapped.
      emitted_code: as the emulator a body, it runs the code of a kernel on the CPU:
        `run(params, arrays) -> arrays`, of each device that takes part.
      gathering: the batching rule of kernels over an axis of their devices.
      expansions: by primitives of others whose equations may become kernels:
        `expand(eqn)` returns a jaxpr that does the same with our kernels, None if it
        does not.
    """

    cpu_lowering: Callable[..., Any]
    cuda_lowering: Callable[..., Any]
    emulator_lowering: Callable[..., Any]
    compiler: Callable[..., Any]
    eager_emulator: Callable[..., Any]
    emitted_code: Callable[..., Any]
    gathering: Callable[..., Any]
    expansions: dict[Any, Callable[[_jax.JaxprEqn], Any]]

    def __init__(self) -> None:
        self.expansions = {}

    def __getattr__(self, name: str) -> Any:
        registry.needed(name)
        return object.__getattribute__(self, name)


ABOVE = Above()


@placement.checked
def _cpu_rule(*args: Any, **params: Any) -> Any:
    return ABOVE.cpu_lowering(*args, **params)


@placement.checked
def _cuda_rule(*args: Any, **params: Any) -> Any:
    return ABOVE.cuda_lowering(*args, **params)


# Not cached: each call of a kernel of several devices has a rendezvous of its own.
_jax.mlir.register_lowering(kernel_p, _cpu_rule, platform="cpu", cacheable=False)
_jax.mlir.register_lowering(kernel_p, _cuda_rule, platform="cuda")


def expansion(eqn: _jax.JaxprEqn) -> _jax.ClosedJaxpr | None:
    """Returns a jaxpr with our kernels for an equation of others, None without one."""
    expand = ABOVE.expansions.get(eqn.primitive)
    return None if expand is None else expand(eqn)


# --- eager calls ----------------------------------------------------------------------


def platform_of(args: Sequence[Any]) -> str:
    for x in args:
        if isinstance(x, jax.Array):
            return next(iter(x.devices())).platform
    default = jax.config.jax_default_device
    if isinstance(default, str):
        return default
    return default.platform if default is not None else jax.default_backend()


@kernel_p.def_impl
def _kernel_impl(*args, **params):
    call = CallParams(**params)
    placement.require_whole_arrays(call.name, args)
    on_device = platform_of(args) in call.mesh.platforms
    if isinstance(call.interpret, types.InterpretParams) or (
        call.interpret is None and not on_device
    ):
        results = ABOVE.eager_emulator(call, args)
        _jax.check_special(f"kernel {call.name}", results)
        return results
    if not on_device:
        raise no_device(call)
    launch = compiled(call)
    if not _jax.splits_programs():
        return launch(*args)
    # To find a NaN, JAX would call the kernel eagerly, which is this function again.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        results = launch(*args)
    _jax.check_special(f"kernel {call.name}", results)
    return results


@dataclasses.dataclass(frozen=True, eq=False)
class _Identity:
    """A cache key of call parameters that compares jaxprs by identity."""

    call: CallParams

    def _key(self):
        call = self.call
        return (id(call.jaxpr), call.batch, call.out_avals, call.interpret,
                call.compiler_params, call.mesh, call.aliases,
                call.devices)  # fmt: skip

    def __eq__(self, other):
        return isinstance(other, _Identity) and self._key() == other._key()

    def __hash__(self):
        return hash(self._key())


def compiled(params: CallParams) -> Callable[..., Any]:
    """Returns a jitted function of the operands that launches a kernel."""
    return _jitted(_Identity(params))


@functools.lru_cache(maxsize=256)
def _jitted(identity: _Identity) -> Callable[..., Any]:
    params = identity.call.as_dict()
    return jax.jit(lambda *args: kernel_p.bind(*args, **params))


def no_device(call: CallParams) -> errors.NoGpuError:
    """Returns the error for a call that requires a device where there is none."""
    device = call.mesh.platforms[0].upper()
    return errors.NoGpuError(
        f"kernel {call.name}: interpret=False needs a {device}, and JAX runs on the "
        "CPU",
        expected=f"a {device}",
        got=f"JAX's default backend {jax.default_backend()!r}",
        hint="omit interpret to run in the emulator, or use "
        f"pallas_gpu.offline.compile to compile without a {device}",
        where=scope.called_at(),
    )


# --- transformations ------------------------------------------------------------------


def _batch_kernel(axis_data, args, dims, **params):
    devices, size = params["devices"], axis_data.size
    if devices is not None and axis_data.name in devices.names:
        return ABOVE.gathering(axis_data, args, dims, **params)
    if size == 0:
        # A grid without CTAs cannot be launched.
        avals = params["out_avals"]
        empty = [jnp.zeros((0, *aval.shape), aval.dtype) for aval in avals]
        return empty, [0] * len(empty)
    # What a kernel updates in place is another array for each instance.
    updated = {operand for operand, _ in params["aliases"]}
    if not updated and all(d is None for d in dims):
        results = kernel_p.bind(*args, **params)
        return results, [None] * len(results)
    batched = tuple(d is not None or i in updated for i, d in enumerate(dims))
    moved = [
        x
        if not batched[i]
        else jnp.broadcast_to(x, (size, *x.shape))
        if dims[i] is None
        else jnp.moveaxis(x, dims[i], 0)
        for i, x in enumerate(args)
    ]
    if not isinstance(params["mesh"], types.Mesh):
        return _one_by_one(args, batched, moved, params)
    if isinstance(params["mesh"], types.CudaMesh):
        raise errors.UnsupportedError(
            f"kernel {params['name']}: jax.vmap of a kernel whose body is MLIR",
            expected="a call for each instance, or a body with an axis for them",
            got=f"jax.vmap over {size} instances",
            hint="use jax.lax.map, or another axis of the arrays and of the grid",
            where=scope.called_at(),
        )
    level = BatchAxis(size, batched)
    out_avals = tuple(
        _jax.ShapedArray((size, *aval.shape), aval.dtype)
        for aval in params["out_avals"]
    )
    # An instance has its own results.
    own = (*batched, *(True,) * len(out_avals))
    params = {
        **params,
        "jaxpr": for_instances(params["jaxpr"], own),
        "batch": (level, *params["batch"]),
        "out_avals": out_avals,
    }
    results = kernel_p.bind(*moved, **params)
    return results, [0] * len(results)


def _one_by_one(args, batched, moved, params):
    """A launch for each instance, on machines whose grid is not ours to extend."""

    def instance(own):
        given = iter(own)
        chosen = zip(args, batched, strict=True)
        each = [next(given) if is_batched else x for x, is_batched in chosen]
        return kernel_p.bind(*each, **params)

    own = [x for x, is_batched in zip(moved, batched, strict=True) if is_batched]
    results = jax.lax.map(instance, own)
    return results, [0] * len(results)


_jax.batching.fancy_primitive_batchers[kernel_p] = _batch_kernel


def _derivative(primals, _, **params):
    if params["out_avals"]:
        _refuse_derivative(**params)
    # A kernel without results only prints, and checks.
    return kernel_p.bind(*primals, **params), []


def _refuse_derivative(*_, **params):
    raise errors.DifferentiationError(
        f"kernel {params['name']}: a kernel has no derivative",
        expected="a function with a derivative in JAX",
        got="jax.grad, jax.jvp or jax.vjp of a kernel",
        hint="wrap the call in a function decorated with jax.custom_vjp and define its "
        "backward pass, as a second kernel or in plain JAX, with f.defvjp(fwd, bwd)",
        where=scope.called_at(),
    )


_jax.ad.primitive_jvps[kernel_p] = _derivative
_jax.ad.primitive_transposes[kernel_p] = _refuse_derivative
