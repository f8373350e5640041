# SPDX-License-Identifier: Apache-2.0
"""Products whose operand is gathered, or whose result is scattered, over devices."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import arch, errors, expect
from pallas_gpu.ops import targets
from pallas_gpu.ops.collectives import fused
from pallas_gpu.ops.collectives.calls import all_gather, reduce_scatter
from pallas_gpu.ops.collectives.devices import AxisName, DeviceCall, varying
from pallas_gpu.ops.gemm.config import MatmulConfig
from pallas_gpu.ops.gemm.matmul import matmul
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.rules import Array, Interpret, vary_alike

_TMA_BYTES = 16
# Rows of the accumulator's layout, and columns of a part that is stored.
_ROWS, _COLUMNS = 64, 32

# Annotations of parameters, with their rules.
Method = Annotated[
    Literal["kernel", "separate", "lax"] | None,
    expect.optional(expect.choice("kernel", "separate", "lax")),
]
Config = Annotated[
    MatmulConfig | None,
    expect.optional(expect.instance(MatmulConfig, written="ops.MatmulConfig(...)")),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call(DeviceCall):
    """A call of a product; `config` is that of the kernel that does both."""

    config: MatmulConfig | None

    @property
    def derived(self) -> _Call:
        """That of a derivative, whose sizes may be others."""
        method = None if self.method == "kernel" else self.method
        return dataclasses.replace(self, config=None, method=method)

    def alone(self, collective: Any, x: jax.Array) -> jax.Array:
        """Gathers rows, or adds up and scatters them, by an operation of its own."""
        method = "lax" if self.method == "lax" else None
        return collective(x, self.axis_name, method=method, **self.of_kernels)

    def product(self, x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
        """Multiplies on each device."""
        return matmul(x, w, **options, **self.of_kernels)

    def is_fused(self, p: Problem, reason: str | None) -> bool:
        """Returns whether one kernel does both."""
        if self.method in ("separate", "lax"):
            return False
        target = targets.chosen(self.compiler_params)
        if not target.has(arch.Feature.WGMMA):
            reason = f"the kernel is one for Hopper, and the target is {target.name}"
        elif p.dtype.itemsize != 2:
            reason = f"the kernel multiplies 16-bit types, and these are {p.dtype}"
        elif any(x * p.dtype.itemsize % _TMA_BYTES for x in (p.n, p.k)):
            reason = "rows are not multiples of 16 bytes"
        if reason is None:
            return self.reaches()
        if self.method is None:
            return False
        raise errors.UnsupportedError(
            f"{self.what}: the kernel does not support this product",
            expected="float16 or bfloat16 on sm_90a, and sizes that it divides",
            got=reason,
            hint='omit method, or method="separate": a kernel for each operation',
        )


@expect.arguments()
def all_gather_matmul(
    x: Array,
    w: Array,
    axis_name: AxisName,
    *,
    method: Method = None,
    config: Config = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Computes `all_gather(x, axis_name) @ w`; rows arrive while others are multiplied.

    A column-parallel layer on rows that are divided among devices. Each device begins
    with its own rows, and its producers store them at the other devices meanwhile. The
    derivative of x is a `matmul_reduce_scatter`.

    Since: sm_90a. Issued by: the host, in a function of `jax.shard_map` over all axes
    of its mesh; composes with `jax.jit`, `jax.lax.scan` and `jax.grad`. Complete when
    the device's result is.

    Args:
      x: (M, K), the device's rows; float16 or bfloat16 for the kernel.
      w: (K, N), of the same type.
      axis_name: name of an axis of the mesh, or a tuple of names.
      method: "kernel", one for both; "separate", a kernel each; "lax", the collective
        of `jax.lax` and a kernel; None chooses.
      config: of the kernel that does both, see `MatmulConfig`, without `transposed` and
        `parts`; other kernels choose theirs.
      compiler_params, interpret: see `kernel`.

    Returns:
      (devices * M, N), of the operands' type.

    Raises:
      UnsupportedError: `method="kernel"`, which does not support the product, or cannot
        reach the devices.
      ShapeError, DTypeError: the operands do not match.
    """
    call = _Call(
        "all_gather_matmul", axis_name, method, compiler_params, interpret,
        config=config,
    )  # fmt: skip
    _check(call, x, w)
    return _gathered(call, *_prepared(call, x, w))


@expect.arguments()
def matmul_reduce_scatter(
    x: Array,
    w: Array,
    axis_name: AxisName,
    *,
    method: Method = None,
    config: Config = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Computes `reduce_scatter(x @ w, axis_name)`; tiles leave while others are
    computed.

    A row-parallel layer whose result is divided among devices by rows. Each device
    computes its own rows last, and adds those of the others to them: partial results
    are rounded to the operands' type on the way, and added in float32. The derivative
    of x is an `all_gather_matmul`.

    Since: sm_90a. Issued by: the host, as `all_gather_matmul`.

    Args:
      x: (M, K), M a multiple of the number of devices; of 64 times that for the kernel.
      w: (K, N), of the same type; N a multiple of 32 for the kernel.
      axis_name: name of an axis of the mesh, or a tuple of names.
      method, config, compiler_params, interpret: see `all_gather_matmul`.

    Returns:
      (M / devices, N), of the operands' type.

    Raises:
      UnsupportedError: `method="kernel"`, which does not support the product, or cannot
        reach the devices.
      ShapeError, DTypeError: the operands do not match.
    """
    call = _Call(
        "matmul_reduce_scatter", axis_name, method, compiler_params, interpret,
        config=config,
    )  # fmt: skip
    _check(call, x, w)
    if x.shape[0] % call.group.size:
        raise errors.ShapeError(
            f"{call.what}: rows cannot be divided among the devices",
            expected=f"a multiple of {call.group.size} rows",
            got=f"{x.shape[0]}, of an array of shape {tuple(x.shape)}",
            hint="pad them with jnp.pad",
        )
    return _scattered(call, *_prepared(call, x, w))


def _check(call: _Call, x: Any, w: Any) -> None:
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0] or not x.size * w.size:
        raise errors.ShapeError(
            f"{call.what}: the shapes do not form a product",
            expected="(M, K) and (K, N) without empty dimensions",
            got=f"{tuple(x.shape)} and {tuple(w.shape)}",
            hint="use jax.vmap of matmul, and a collective, for batches",
        )
    if x.dtype != w.dtype:
        raise errors.DTypeError(
            f"{call.what}: the element types differ",
            expected="one type for both operands",
            got=f"{x.dtype} and {w.dtype}",
            hint="convert one with astype",
        )


def _prepared(call: _Call, x: jax.Array, w: jax.Array) -> Any:
    return vary_alike((varying(x, call.group), w))


def _problem(call: _Call, m: int, x: jax.Array, w: jax.Array) -> Problem:
    return Problem(
        m=m,
        n=w.shape[1],
        k=x.shape[1],
        dtype=jnp.dtype(x.dtype),
        out_dtype=jnp.dtype(x.dtype),
        batch=call.group.size,
        shared_b=True,
        **call.of_kernels,
    )


def _config(call: _Call, p: Problem, choose: Any) -> MatmulConfig:
    """Returns the configuration of a kernel whose CTAs wait for those of others.

    Raises:
      ArgumentError: the kernel does not have it.
    """
    c = call.config
    if c is None:
        c = choose(p)
        return dataclasses.replace(c, blocks=min(c.blocks, _sm_count()))
    if c.transposed or c.parts > 1 or c.blocks > _sm_count():
        raise errors.ArgumentError(
            f"{call.what}: the configuration is not one of this kernel",
            expected=f"transposed=False, parts=1, and at most {_sm_count()} blocks, "
            "which run at the same time",
            got=f"transposed={c.transposed}, parts={c.parts}, blocks={c.blocks}",
            hint="leave config out, or pass method='separate'",
        )
    return c


def _sm_count() -> int:
    """Returns the SMs of each GPU that is there, or of the default target."""
    gpus = [d for d in jax.devices() if d.platform == "gpu"]
    return min((d.core_count for d in gpus), default=arch.SM_90A.sm_count)


def _run_gathered(call: _Call, x: jax.Array, w: jax.Array) -> jax.Array:
    p = _problem(call, x.shape[0], x, w)
    if not call.is_fused(p, None):
        return call.product(call.alone(all_gather, x), w)
    config = _config(call, p, fused.choose_gathering)
    kernel = fused.gathering_kernel(p.but(config=config), call.group)
    return kernel(x[None], w[None]).reshape(-1, p.n)


def _run_scattered(call: _Call, x: jax.Array, w: jax.Array) -> jax.Array:
    n = call.group.size
    p = _problem(call, x.shape[0] // n, x, w)
    reason, rows, columns = None, _ROWS, _COLUMNS
    if call.config is not None:
        rows, columns = call.config.epilogue_m, call.config.epilogue_n
    if p.m % rows or p.n % columns:
        reason = f"a result of {p.m} x {p.n}, not multiples of {rows} and {columns}"
    if not call.is_fused(p, reason):
        return call.alone(reduce_scatter, call.product(x, w))
    config = _config(call, p, fused.choose)
    kernel = fused.scattering_kernel(p.but(config=config), call.group)
    return kernel(x.reshape(n, p.m, p.k), w[None])[0]


def _gathered_backward(call: _Call, operands: Any, g: jax.Array) -> Any:
    x, w = operands
    rows = call.alone(all_gather, x)
    return _run_scattered(call.derived, g, w.T), call.product(rows, g, transpose_a=True)


def _scattered_backward(call: _Call, operands: Any, g: jax.Array) -> Any:
    x, w = operands
    rows = call.alone(all_gather, g)
    return _run_gathered(call.derived, g, w.T), call.product(x, rows, transpose_a=True)


def _with_derivative(f: Any, backward: Any) -> Any:
    rule = jax.custom_vjp(f, nondiff_argnums=(0,))
    rule.defvjp(lambda call, x, w: (f(call, x, w), (x, w)), backward)
    return rule


_gathered = _with_derivative(_run_gathered, _gathered_backward)
_scattered = _with_derivative(_run_scattered, _scattered_backward)
