# SPDX-License-Identifier: Apache-2.0
"""Objects and names of other kernel languages where those of this package are meant.

JAX's own Pallas has the same names, so a program that mixes the imports looks right.
"""

from __future__ import annotations

from typing import Any

import jax

from pallas_gpu import _jax, errors

# The names that `import pallas_gpu` offers; the package enters them, being above this.
PUBLIC_NAMES: set[str] = set()

# Classes there whose counterpart here has another name; others have the same.
_OURS = {
    "GPUMemoryRef": "SMEM",
    "MemoryRef": "SMEM",
    "GPUMemorySpace": "SMEM",
    "WGMMAAccumulatorRef": "ACC",
    "_WGMMAAccumulatorRef": "ACC",
    "ParameterizedLayout": "TiledLayout",
    "InterpretGPUParams": "InterpretParams",
    "TileTransform": "TilingTransform",
}

# What to write for names that this package does not have. The tests compare those of
# JAX's Pallas with docs/porting.md.
_DEVICES = (
    "plgpu.copy_smem_to_gmem to plgpu.remote_ref(ref, device_id), "
    "plgpu.wait_smem_to_gmem(0) and plgpu.semaphore_signal(semaphore, device_id=...)"
)
_JNP = "in a kernel, too, this is jax.numpy's: jnp."
_COPY = (
    "plgpu.copy_gmem_to_smem(source, target, barrier) and plgpu.barrier_wait(barrier), "
    "or plgpu.copy_smem_to_gmem and plgpu.wait_smem_to_gmem(0), copy by TMA; a "
    "plgpu.BlockSpec copies blocks by itself"
)
_SYNC = "not needed: a warpgroup synchronizes for the operations that exchange elements"

INSTEAD: dict[str, str] = {
    # JAX's Pallas and its Mosaic GPU dialect
    "broadcast_to": _JNP + "broadcast_to",
    "Buffered": "plgpu.CompilerParams(max_concurrent_steps=2), or the argument of "
    "plgpu.emit_pipeline",
    "core_map": "plgpu.kernel(body, out_type=(), mesh=mesh)()",
    "enable_poison_buffers": "the emulator always fills fresh memory with poison; "
    'plgpu.InterpretParams(uninitialized_memory="zero") turns it off',
    "Indirect": "plgpu.GMEM as the block's memory space, and an index by an array",
    "mosaic_gpu": "import pallas_gpu as plgpu",
    "select_ref": "plgpu.when for each case",
    "semaphore": "declare plgpu.SemaphoreType.REGULAR",
    "async_remote_copy": _DEVICES,
    "make_async_remote_copy": _DEVICES,
    # JAX's Pallas for TPUs, and its backend for Triton
    **dict.fromkeys(
        ("async_copy", "make_async_copy", "start", "wait"), _COPY
    ),
    "VMEM": "plgpu.SMEM(shape, dtype)",
    "TPUCompilerParams": "plgpu.CompilerParams(dimension_semantics=...)",
    "roll": _JNP + "roll",
    "repeat": _JNP + "repeat",
    "bitcast": "jax.lax.bitcast_convert_type(x, dtype), or ref.bitcast(dtype)",
    "reciprocal": "1 / x",
    "prng_seed": "jax.random.key(seed)",
    "prng_random_bits": "jax.random.bits(key, shape)",
    "max_contiguous": "plgpu.multiple_of(start, elements), the start of a range",
    "approx_tanh": "plgpu.CompilerParams(approx_math=True), and jnp.tanh",
    # Triton
    "debug_barrier": _SYNC,
    **dict.fromkeys(
        (
            "GpuInfo", "GpuVersion", "get_gpu_info", "get_gpu_info_from_version",
            "is_gpu_device",
        ),
        "plgpu.arch.target(name), the limits of a GPU",
    ),
    "device_print": "plgpu.debug_print(format, x)",
    "device_assert": "plgpu.debug_check(condition, message)",
    "dot": _JNP + "dot(a, b, preferred_element_type=jnp.float32), or plgpu.wgmma",
    "make_block_ptr": "plgpu.BlockSpec(block_shape, index_map)",
    "make_tensor_descriptor": "plgpu.BlockSpec(block_shape, index_map), or "
    "plgpu.copy_gmem_to_smem: both copy by TMA",
    "rand": "jax.random.uniform(jax.random.key(seed), shape)",
    "randint": "jax.random.bits(jax.random.key(seed), shape)",
    "range": "plgpu.loop(start, stop), jax.lax.fori_loop, or Python's range",
    "static_assert": "Python's assert: the body is Python",
    "static_range": "Python's range: the body is Python",
    "constexpr": "a Python value of the function around the body",
    **{
        name: _JNP + name
        for name in (
            "arange", "argmax", "argmin", "cumsum", "exp", "exp2", "full", "log",
            "maximum", "minimum", "sqrt", "where", "zeros", "zeros_like",
        )
    },
}  # fmt: skip


def is_foreign(x: Any) -> bool:
    """True for an object, or a class, of JAX's Pallas."""
    kind = x if isinstance(x, type) else type(x)
    package, *parts = str(kind.__module__).split(".")
    return package == "jax" and ("pallas" in parts or "mosaic" in parts)


def refuse_foreign(values: Any, what: str) -> None:
    """Raises ArgumentTypeError if a leaf of a pytree is an object of JAX's Pallas.

    Args:
      values: one or several arguments.
      what: the function and the argument, e.g. `"kernel: scratch_types"`.
    """
    try:
        leaves = jax.tree.leaves(values, is_leaf=is_foreign)
    except ValueError:
        # Keys of a dict that JAX cannot sort, names of axes and tuples of them.
        return
    for leaf in leaves:
        if is_foreign(leaf):
            kind = leaf if isinstance(leaf, type) else type(leaf)
            ours = _OURS.get(kind.__name__, kind.__name__)
            raise errors.ArgumentTypeError(
                f"{what}: an object of JAX's Pallas is passed",
                expected="an object of this package",
                got=f"{kind.__module__}.{kind.__name__}",
                hint=_use(ours),
                where=_jax.where_now(),
            )


def foreign_function(name: str) -> errors.ArgumentTypeError:
    """Returns the error for a call of a function of JAX's Pallas in a kernel."""
    return errors.ArgumentTypeError(
        f"{name} of JAX's Pallas is called in a kernel of this package",
        expected="the functions of this package, which know its references",
        got=f"{name} of jax.experimental.pallas",
        hint=_use(name),
    )


def _use(name: str) -> str:
    if name in PUBLIC_NAMES:
        return f"`import pallas_gpu as plgpu`, and use `plgpu.{name}`"
    known = INSTEAD.get(name)
    if known is not None:
        return f"this package has no {name}: {known}"
    return f"this package has no {name}; docs/coverage.md lists what it has"
