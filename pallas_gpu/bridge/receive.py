# SPDX-License-Identifier: Apache-2.0
"""JAX's own `pl.pallas_call` with this package's `CompilerParams`.

JAX asks the public registry of `jax.extend.pallas` for a lowering on GPUs. On the CPU
it asks nobody: there the lowering of its primitive is overridden for calls with our
parameters. Offline compilation expands the primitive in the same way. Each of them
calls this package's `pallas_call`, whose body evaluates the received one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.pallas

from pallas_gpu import _jax, types
from pallas_gpu.bridge import control, positions, references, scratch, semaphores
from pallas_gpu.bridge.evaluate import Evaluator
from pallas_gpu.bridge.origin import located, with_names
from pallas_gpu.bridge.specs import block_spec
from pallas_gpu.entry import call
from pallas_gpu.pipeline.pallas_call import pallas_call

__all__ = ["control", "positions", "references", "run", "semaphores"]


def run(*operands: Any, **params: Any) -> list[Any]:
    """Runs a call of `pl.pallas_call`.

    Args:
      *operands: traced sizes of the grid, prefetched arrays, the other arguments.
      **params: the parameters of JAX's primitive.

    Raises:
      KernelError and its classes: the kernel is wrong.
      UnsupportedError: the call or an operation has no counterpart in this package.
    """
    mapping, jaxpr = params["grid_mapping"], params["jaxpr"]
    name = params["name"] or _jax.source_of(jaxpr).partition(" at ")[0]
    bounds = iter(operands[: mapping.num_dynamic_grid_bounds])
    grid = [n if isinstance(n, int) else next(bounds) for n in mapping.grid]
    n_in = mapping.num_inputs
    specs = [block_spec(m) for m in mapping.block_mappings]
    declared = [scratch.declaration(aval) for aval in mapping.scratch_avals]
    mapped = set(mapping.vmapped_dims)
    axes = tuple(a for a in range(len(mapping.grid)) if a not in mapped)
    evaluator = Evaluator(axes)

    def body(*refs: Any) -> None:
        evaluator.run(jaxpr, refs)

    count = len(getattr(jaxpr, "jaxpr", jaxpr).invars)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in params["out_avals"]]
    received = pallas_call(
        with_names(located(body, jaxpr), scratch.names(jaxpr, count)),
        results,
        grid_spec=types.PrefetchScalarGridSpec(
            num_scalar_prefetch=mapping.num_index_operands,
            grid=grid,
            in_specs=specs[:n_in],
            out_specs=specs[n_in:],
            scratch_shapes=declared,
        ),
        input_output_aliases=dict(params["input_output_aliases"]) or None,
        debug=params["debug"],
        name=name,
        compiler_params=_for_the_grid(params["compiler_params"], mapping, axes),
        interpret=_interpretation(params["interpret"]),
    )
    return list(received(*operands[mapping.num_dynamic_grid_bounds :]))


def _for_the_grid(
    given: types.CompilerParams, mapping: Any, axes: Sequence[int]
) -> types.CompilerParams:
    """Adds the axes of `jax.vmap`, which are parallel, to the dimension semantics."""
    kinds = given.dimension_semantics
    if kinds is None or len(kinds) != len(axes):
        return given
    of_axis = dict(zip(axes, kinds, strict=True))
    every = [of_axis.get(a, "parallel") for a in range(len(mapping.grid))]
    return dataclasses.replace(given, dimension_semantics=every)


def _interpretation(given: Any) -> Any:
    """Returns our `interpret` for JAX's, whose default is False."""
    if given is False:
        return None
    types.refuse_foreign(given, "pallas_call: interpret")
    return given


# --- lowerings ------------------------------------------------------------------------


def _rule(ctx: Any, *operands: Any, **params: Any) -> Any:
    """MLIR lowering of JAX's primitive for calls with our parameters."""
    received = functools.partial(run, **params)
    return _jax.mlir.lower_fun(received, multiple_results=True)(ctx, *operands)


def _is_ours(params: dict[str, Any]) -> bool:
    return isinstance(params["compiler_params"], types.CompilerParams)


def _on_cpu(default: Any, ctx: Any, *operands: Any, **params: Any) -> Any:
    return (_rule if _is_ours(params) else default)(ctx, *operands, **params)


def _on_gpu(default: Any, ctx: Any, *operands: Any, **params: Any) -> Any:
    # Without `interpret` JAX asks the public registry.
    emulated = _is_ours(params) and params["interpret"] is not False
    return (_rule if emulated else default)(ctx, *operands, **params)


@functools.cache
def _override(primitive: Any) -> None:
    _jax.override_lowering(primitive, "cpu", _on_cpu)
    _jax.override_lowering(primitive, "cuda", _on_gpu)
    call.ABOVE.expansions[primitive] = _expand


def _expand(eqn: _jax.JaxprEqn) -> Any:
    """Returns a jaxpr with our kernel for an equation of JAX's primitive, or None."""
    if not _is_ours(eqn.params):
        return None
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    with _jax.around(eqn):
        return jax.make_jaxpr(functools.partial(run, **eqn.params))(*avals)


def _when_used() -> None:
    """Overrides the primitive's lowerings if the user has imported JAX's Pallas."""
    primitive = _jax.pallas_call_primitive()
    if primitive is not None:
        _override(primitive)


jax.extend.pallas.register_lowering_rule(types.CompilerParams, _rule, "gpu")
types.on_use_of_params(_when_used)
