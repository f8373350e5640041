# SPDX-License-Identifier: Apache-2.0
"""How an argument's effect is observed: calls that differ in it end differently."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import public_calls as calls
from tests.support import public_names as names
from tests.support.public_calls import F16, F32, OUT, SHAPE, SWIZZLED

# The row of an argument whose docstring calls it a hint.
HINT = object()


@dataclasses.dataclass(frozen=True)
class Refused:
    """The row of an argument that accepts its default alone, and another value."""

    value: Any


def outcome(call: Callable[[], Any]) -> str:
    """How a call ends: its result, or the first row of its error."""
    try:
        return str(call())
    except errors.PallasGpuError as error:
        return f"{type(error).__name__}: {error.what}"


def values(fn: Callable[..., Any], *arguments: dict[str, Any]) -> list[str]:
    """The results of one function for several arguments."""
    return [outcome(functools.partial(fn, **a)) for a in arguments]


def lowered(kernel: Callable[..., Any], target: str = "sm_90a") -> str:
    """A kernel as MLIR."""
    return outcome(
        lambda: [r.mlir for r in plgpu.offline.lower(kernel, OUT, target=target)]
    )


def kernels(body: Callable[..., None], *options: dict[str, Any]) -> list[str]:
    """Kernels of one body as MLIR."""
    made = ({"out_type": OUT, "name": "k", **o} for o in options)
    return [outcome(lambda o=o: lowered(plgpu.kernel(body, **o))) for o in made]


# An output that every CTA gets whole, in GMEM.
WHOLE = plgpu.BlockSpec(memory_space=plgpu.GMEM)


def block_calls(*options: dict[str, Any], body: Any = None) -> list[str]:
    """Calls of `pallas_call` as MLIR."""
    body = body or calls.nothing
    made = [functools.partial(plgpu.pallas_call, body, OUT, **o) for o in options]
    return [outcome(lambda m=m: lowered(m())) for m in made]


def specs(*given: plgpu.BlockSpec, grid: int = 2) -> list[str]:
    """Calls of `pallas_call` that differ in the spec of their input."""
    return block_calls(
        *({"grid": grid, "in_specs": [spec], "out_specs": WHOLE} for spec in given)
    )


def grid_specs(*given: dict[str, Any]) -> list[str]:
    """Calls of `pallas_call` that differ in their `GridSpec`."""
    made = ({"out_specs": WHOLE, **fields} for fields in given)
    return block_calls(*({"grid_spec": plgpu.GridSpec(**fields)} for fields in made))


def bodies(*inside: Callable[[calls.Env], Any], blackwell: bool = False) -> list[str]:
    """Kernels that differ in one call of their body, as MLIR."""

    def run(call: Callable[[calls.Env], Any], env: calls.Env) -> None:
        call(env)

    return [
        lowered(
            calls.kernel(functools.partial(run, call), blackwell=blackwell),
            "sm_100a" if blackwell else "sm_90a",
        )
        for call in inside
    ]


def argument(name: str, *given: Any) -> list[str]:
    """How a good call ends with two values of an argument, or without and with one.

    Args:
      name: of the callable and of the argument, as "load.idx".
      given: the values, or functions that make them of the `Env` of a body.
    """
    owner, _, parameter = name.rpartition(".")
    good, function = calls.good()[owner], names.public_callables()[owner]

    def call(env: Any, changed: dict[str, Any]) -> Any:
        arguments = {k: v for k, v in good.arguments(env).items() if k != parameter}
        for key, value in changed.items():
            made = isinstance(value, types.FunctionType)
            arguments[key] = value(env) if made else value
        result = names.call(function, arguments)
        good.then(result, env)
        return result

    changes = [{parameter: value} for value in given]
    if len(changes) == 1:
        changes.insert(0, {})
    each = [functools.partial(call, changed=change) for change in changes]
    if good.inside:
        return bodies(*each, blackwell=good.blackwell)
    return [outcome(functools.partial(one, None)) for one in each]


def scratch(*declarations: Any) -> list[str]:
    """Kernels that differ in a declaration of scratch, as MLIR."""
    return kernels(calls.nothing, *({"scratch_types": [d]} for d in declarations))


def run_on_ones(kernel: Callable[..., Any]) -> str:
    """The outcome of running a kernel in the emulator."""
    return outcome(lambda: kernel(jnp.ones(SHAPE, F32)))


def interpreted(make: Callable[..., Any]) -> list[str]:
    """The outcomes of a kernel in the emulator, and where it may not run."""
    return [run_on_ones(make(interpret=i)) for i in (True, False)]


def printed(make: Callable[..., Any]) -> list[str]:
    """What the trace of a kernel prints, without and with `debug`."""
    texts = []
    for debug in (False, True):
        with contextlib.redirect_stdout(io.StringIO()) as text:
            jax.eval_shape(make(debug=debug), OUT)
        texts.append(text.getvalue())
    return texts


def params(**fields: Any) -> dict[str, Any]:
    """Compiler parameters as an option of a kernel."""
    return {"compiler_params": plgpu.CompilerParams(**fields)}


# --- bodies ---------------------------------------------------------------------------


def at_axis(name: str) -> Callable[..., None]:
    """A body that depends on its position."""

    def body(x: Any, o: Any) -> None:
        o[...] = x[...] + lax.axis_index(name).astype(F32)

    return body


def exp(x: Any, o: Any) -> None:
    """A body that `approx_math` changes."""
    o[...] = jnp.exp(x[...])


def exchange(x: Any, o: Any, s: Any) -> None:
    """A body whose warps exchange elements through SMEM."""
    s[0, 0] = x[0, 0]
    o[0, 0] = s[0, 0]


def two_layouts(x: Any, o: Any) -> None:
    """A body that needs a relayout, which only Warpgroup semantics inserts."""
    strided = plgpu.Layout.WG_STRIDED(SHAPE, vec_size=4)
    a = plgpu.load(x, layout=plgpu.Layout.WGMMA)
    o[...] = a + plgpu.load(x, layout=strided)


def product(x: Any, o: Any, a: Any, acc: Any) -> None:
    """A body of Hopper's tensor core."""
    plgpu.wgmma(acc, a, a)
    plgpu.wgmma_wait(0)


PRODUCT = {"scratch_types": [plgpu.SMEM((64, 64), F16, transforms=SWIZZLED),
                             plgpu.ACC((64, 64))]}  # fmt: skip
