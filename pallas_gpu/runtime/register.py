# SPDX-License-Identifier: Apache-2.0
"""Registers the CUDA lowering of the kernel primitive: custom call or emulator."""

from __future__ import annotations

import collections
import functools
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gpu import _jax, arch, compiler, types
from pallas_gpu.entry import call
from pallas_gpu.lowering.machine import Build
from pallas_gpu.runtime import cupti, custom_call, devices, dumps, serialize
from pallas_gpu.runtime import offline_compiler as offline
from pallas_gpu.runtime import stages as stages  # adds its stages
from pallas_gpu.runtime.serialize import SerializedModule


def observe(stage: str, name: str, text: Any) -> None:
    """Keeps a text if PALLAS_GPU_KEEP names it and the kernel has it."""
    if dumps.is_kept(stage) and (kept := text()) is not None:
        dumps.dump(stage, name, kept)


def attached_target() -> arch.GpuTarget:
    """Returns the target of the first GPU, or the default if there is none.

    Raises:
      TargetError: the GPU is not supported.
    """
    return _attached() or arch.DEFAULT_TARGET


@functools.cache
def _attached() -> arch.GpuTarget | None:
    device = cupti.first_gpu()
    if device is None:
        return None
    major, minor = str(device.compute_capability).split(".")
    return arch.target_of_capability(int(major), int(minor))


# Variants of a body: a body that is batched in each call must not pile up.
_KEPT_VARIANTS = 64


class _Compiled:
    """Serialized modules by traced body, as long as it exists, target and parameters.

    A traced body is thousands of objects: one that nobody can launch again must not be
    kept, or Python's garbage collector visits it again and again.
    """

    def __init__(self) -> None:
        self._bodies: weakref.WeakKeyDictionary[
            _jax.Jaxpr, collections.OrderedDict[Any, SerializedModule]
        ]
        self._bodies = weakref.WeakKeyDictionary()

    def get(self, params: call.CallParams, target: arch.GpuTarget) -> SerializedModule:
        kept = self._variants(params).get(_variant(params, target))
        return self.lowered(params, target).serialized if kept is None else kept

    def lowered(self, params: call.CallParams, target: arch.GpuTarget) -> Build:
        """Lowers a kernel, and keeps its module for `get`."""
        build = compiler.run(Build(params, target), until="serialize", observe=observe)
        variants = self._variants(params)
        variants[_variant(params, target)] = build.serialized
        if len(variants) > _KEPT_VARIANTS:
            variants.popitem(last=False)
        return build

    def _variants(self, params: call.CallParams) -> Any:
        return self._bodies.setdefault(params.jaxpr, collections.OrderedDict())


def _variant(params: call.CallParams, target: arch.GpuTarget) -> Any:
    return (
        params.mesh, params.batch, params.compiler_params, params.devices, target.name
    )  # fmt: skip


_COMPILED = _Compiled()


def lower_ahead(params: call.CallParams, target: arch.GpuTarget) -> Build:
    """Lowers a kernel to bytes, which a later launch of it uses.

    Raises:
      PallasGpuError: the kernel does not compile.
    """
    return _COMPILED.lowered(params, target)


# Arrays that kernels keep: by the kernel, the number of the array, and the devices.
_KEPT: dict[Any, list[jax.Array]] = {}


def _addresses(
    serialized: SerializedModule, i: int, aval: Any, value: Any, ids: tuple[int, ...]
) -> np.ndarray:
    """Returns where the ith array of a kernel, which is kept, is on each device."""
    key = serialized.hash, i, ids
    if key not in _KEPT:
        gpus = {device.id: device for device in jax.local_devices(backend="cuda")}
        contents = np.full(aval.shape, value, aval.dtype)
        with jax.ensure_compile_time_eval():
            made = [jax.device_put(contents, gpus[each]) for each in ids]
            _KEPT[key] = jax.block_until_ready(made)
    found = [array.unsafe_buffer_pointer() for array in _KEPT[key]]
    # XLA would compute equal distances, as it does those of `jnp.arange`.
    return np.array([*found, 0], np.int64)


def _launch(*args: Any, **params: Any) -> list[Any]:
    kernel = call.CallParams(**params)
    target = compiler.target_of(kernel, attached_target)
    if (attached := _attached()) is not None:
        # Without a GPU this lowers for another machine, e.g. to export a program.
        compiler.require_runs_on(target, attached, kernel.name)
    serialized = _COMPILED.get(kernel, target)
    work_operands = [aval for aval, _ in kernel.work_operands]
    results = [*kernel.out_avals, *kernel.work_results]
    offline.keep_device_code(
        serialized,
        name=kernel.name,
        target=target,
        operand_avals=[*args, *work_operands],
        result_avals=results,
    )
    n_in, n_out = len(args), len(kernel.out_avals)
    filled, in_place = [], dict(kernel.aliases)
    with jax.enable_x64(True):  # else JAX would make 32 bits of 64
        for i, (aval, value) in enumerate(kernel.work_operands):
            if ids := kernel.workspace[i].listed(kernel.devices):
                added = jnp.asarray(_addresses(serialized, i, aval, value, ids))
                results[n_out + i] = jax.ShapeDtypeStruct((), aval.dtype)
            else:
                added = jnp.full(aval.shape, value, aval.dtype)
                in_place[n_in + i] = n_out + i
            filled.append(added)
    attributes = devices.attributes(kernel)
    if attributes and args:
        args = jax.lax.optimization_barrier(args)
    made = custom_call.call(
        [*args, *filled],
        [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in results],
        serialized,
        attributes=attributes,
        has_side_effect=kernel.is_observable,
        input_output_aliases=in_place,
    )[:n_out]
    # In a loop XLA makes slices of larger arrays of operands and results, at an address
    # that changes; it tells the other devices the first one alone.
    return list(jax.lax.optimization_barrier(made)) if attributes else made


_custom_call_rule = _jax.mlir.lower_fun(_launch, multiple_results=True)


def _cuda_rule(ctx: Any, *args: Any, **params: Any) -> Any:
    of_another = "cuda" not in params["mesh"].platforms
    if of_another or isinstance(params["interpret"], types.InterpretParams):
        return call.ABOVE.emulator_lowering(ctx, *args, **params)
    options = params["compiler_params"]
    if ctx.is_forward_compat() and options.ir_version is None:
        # jax.export: an older plugin may read it.
        older = options.replace(ir_version=serialize.FORWARD_COMPATIBLE)
        params = {**params, "compiler_params": older}
    devices.require_one_process(ctx, call.CallParams(**params))
    params = {**params, "devices": devices.present(ctx, params["devices"])}
    return _custom_call_rule(ctx, *args, **params)


call.ABOVE.cuda_lowering = _cuda_rule
call.ABOVE.compiler = compiler.lower
