# SPDX-License-Identifier: Apache-2.0
"""Configurations of the kernels that JAX installs, with operands and their results.

Each pair of values of two options is in one of a kernel's configurations. The first one
has the first value of each.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support import host
from tests.support.installed_kernels import ported


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration of a kernel.

    Attributes:
      options: its values.
      make: returns a function, its arguments, and what the results are.
      error: of the results, absolute and relative.
      target: what it is for.
      alarm: what the emulator reports of it, see docs/differences.md.
      lane: whether it can be lowered under Lane semantics.
    """

    options: dict[str, Any]
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...], Any]]
    error: float
    target: str
    alarm: str | None
    lane: bool


CASES: dict[str, Case] = {}
_Options = dict[str, Sequence[Any]]


def in_pairs(options: _Options) -> Iterator[dict[str, Any]]:
    """Yields configurations until each pair of values was in one."""
    numbers: dict[Any, int] = {}
    masks = {}
    for row in itertools.product(*options.values()):
        pairs = itertools.combinations(enumerate(row), 2)
        masks[row] = sum(1 << numbers.setdefault(x, len(numbers)) for x in pairs)
    left = (1 << len(numbers)) - 1
    while left:
        best = max(masks, key=lambda row: (masks[row] & left).bit_count())
        left &= ~masks[best]
        yield dict(zip(options, best, strict=True))


def kernel(
    title: str,
    options: _Options,
    *,
    error: float = 0.05,
    target: str = "sm_90a",
    alarm: Callable[..., str | None] = lambda **_: None,
    lane: Callable[..., bool] = lambda **_: True,
) -> Callable[[Any], Any]:
    """Enters the configurations of a kernel, which the decorated function makes."""

    def enter(make: Any) -> Any:
        for i, given in enumerate(in_pairs(options)):
            made = functools.partial(make, **given)
            CASES[f"{title} {i}"] = Case(
                given, made, error, target, alarm(**given), lane(**given)
            )
        return make

    return enter


def normal(shape: Any, dtype: Any = jnp.float16, seed: int = 0) -> Any:
    x = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return host.array(x / 8 if seed else x, dtype)


def wide(x: Any) -> Any:
    return np.asarray(x, np.float32)


def derivatives(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the derivatives of a function, of a weighted sum of its results."""

    def function(*x: Any) -> Any:
        out, vjp = jax.vjp(f, *x)
        return vjp(host.array(np.arange(out.size).reshape(out.shape) % 3, out.dtype))

    return function


_BOOLS = (False, True)
_HALF = (jnp.float16, jnp.bfloat16)
_FLOATS = (jnp.float32, jnp.float16)
_WHILE_READ = "while the wgmma may still read it"
_GRID = {"grid_minor_dim": ("N", "M"), "grid_tile_width": (1, 4)}

# --- products on Hopper ---------------------------------------------------------------

_PRODUCT: _Options = {
    # M, N, K and steps ahead.
    "tile": (
        (64, 64, 64, 2), (64, 128, 64, 4), (128, 64, 128, 2), (128, 128, 64, 2),
        (256, 64, 64, 2), (64, 64, 128, 4),
    ),
    "epilogue": (64, None), "wg_dimension": ("N", "M"),
    "cluster_dimension": (None, "M", "N"), "dtype": _HALF, **_GRID,
}  # fmt: skip


def _tiles(module: Any, given: dict[str, Any]) -> tuple[Any, int, int]:
    """Returns a configuration of a product, and M and N of one and two clusters."""
    dims, fields = module.MatmulDimension, module.TuningConfig.__dataclass_fields__
    named = {k: v for k, v in given.items() if k in fields}
    named |= {k: dims[v] for k, v in named.items() if isinstance(v, str)}
    named |= dict.fromkeys(("epi_tile_m", "epi_tile_n"), given["epilogue"])
    divided = given["wg_dimension"], given["cluster_dimension"]
    m, n = (given["tile"][i] * 2 ** divided.count("MN"[i]) for i in (0, 1))
    return module.TuningConfig(*given["tile"], **named), m, 2 * n


@kernel("matmul", {**_PRODUCT, "c": _BOOLS})
def _hopper(**given: Any) -> Any:
    config, m, n = _tiles(module := ported("hopper_matmul_mgpu"), given)
    k, dtype = 2 * given["tile"][2], given["dtype"]
    a, b = normal((m, k), dtype), normal((k, n), dtype, 1)
    c = normal((m, n), dtype, 2) if given["c"] else None
    expected = wide(a) @ wide(b) + (0 if c is None else wide(c))
    return lambda *x: module.matmul(*x, config), (a, b, c), expected


@kernel("mixed", {**_PRODUCT, "out_dtype": (*_HALF, jnp.float32)}, error=0.15)
def _mixed(out_dtype: Any, **given: Any) -> Any:
    config, m, n = _tiles(module := ported("hopper_mixed_type_matmul_mgpu"), given)
    k, how = 2 * given["tile"][2], {"out_dtype": out_dtype, "config": config}
    a = host.array(np.random.default_rng(0).integers(-8, 8, (m, k)), jnp.int8)
    b = normal((k, n), given["dtype"], 1)
    return lambda *x: module.mixed_matmul_kernel(*x, **how), (a, b), wide(a) @ wide(b)


def _groups(sizes: Any) -> list[slice]:
    ends = np.cumsum(sizes)
    return [slice(end - n, end) for end, n in zip(ends, sizes, strict=True)]


def _by_group(a: Any, b: Any, sizes: Any) -> Any:
    parts = zip(_groups(sizes), wide(b), strict=True)
    return np.concatenate([wide(a[rows]) @ x for rows, x in parts])


@kernel(
    "ragged_dot",
    {
        "block_m": (64, 128, 192), "block_n": (64, 128, 192),
        "max_concurrent_steps": (4, 2), "grid_block_n": (1, 2),
        "transpose_rhs": _BOOLS, "load_group_sizes_to_register": (True, False),
    },
    alarm=lambda max_concurrent_steps, **_: (
        _WHILE_READ if max_concurrent_steps < 3 else None
    ),
    lane=lambda **_: False,
)  # fmt: skip
def _ragged(**given: Any) -> Any:
    sizes = np.asarray([100, 0, 92], np.int32)
    a, b = normal((192, 192)), normal((3, 192, 2 * given["block_n"]), seed=1)
    expected = _by_group(a, b, sizes)
    b = host.array(np.asarray(b).swapaxes(1, 2)) if given["transpose_rhs"] else b
    call = functools.partial(ported("ragged_dot_mgpu").ragged_dot, block_k=64, **given)
    return lambda a, b, g: call(a, b, group_sizes=g), (a, b, sizes), expected


@kernel(
    "transposed_ragged_dot",
    {
        "block": ((64, 64, 64), (128, 64, 64), (64, 128, 128), (128, 128, 64)),
        "max_concurrent_steps": (1, 2, 4), "grid_block_n": (1, 2),
    },
    alarm=lambda block, max_concurrent_steps, **_: (
        _WHILE_READ if 1 < max_concurrent_steps < (5 if block[2] == 64 else 3) else None
    ),
)  # fmt: skip
def _transposed(block: Any, **given: Any) -> Any:
    sizes = np.asarray([100, 0, 284], np.int32)
    a, b = normal((384, block[0])), normal((384, 2 * block[1]), seed=1)
    expected = np.stack([wide(a[s]).T @ wide(b[s]) for s in _groups(sizes)])
    module = ported("transposed_ragged_dot_mgpu")
    given |= zip(("block_m", "block_n", "block_k"), block, strict=True)
    call = functools.partial(module.transposed_ragged_dot, **given)
    return lambda a, b, g: call(a, b, group_sizes=g), (a, b, sizes), expected


# --- attention on Hopper --------------------------------------------------------------

_ATTENTION: _Options = {
    # Keys and values of a block, and the size of a head.
    "block": (
        (64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (256, 64), (256, 128)
    ),
    "max_concurrent_steps": (2, 3), "kv_heads": (2, 1), "residuals": _BOOLS,
}  # fmt: skip


@kernel(
    "attention",
    {"name": ("attention",), **_ATTENTION, "causal": _BOOLS},
    error=0.005,
    alarm=lambda causal, block, **_: (
        "is freed while the copy" if causal and block[0] == 128 else None
    ),
)
@kernel(
    "emitter",
    {
        "name": ("attention_with_pipeline_emitter",),
        **_ATTENTION,
        "use_schedule_barrier": (True, False),
    },
    error=0.005,
    lane=lambda **_: False,
)
def _attention(name: str, block: Any, kv_heads: int, residuals: bool, **given: Any):
    module = ported("attention_mgpu")
    block_kv, head_dim = block
    config = module.TuningConfig(64, block_kv, **given)
    length = min(256, 2 * block_kv)
    q = normal((1, length, 2, head_dim))
    k, v = (normal((1, length, kv_heads, head_dim), seed=i) for i in (1, 2))
    causal = given.get("causal", False)
    expected = module.attention_reference(q, k, v, causal, residuals)
    attend = getattr(module, name)
    return lambda *x: attend(*x, config, residuals), (q, k, v), expected


@kernel(
    "derivatives",
    {
        "head_dim": (64, 128), "kv_heads": (2, 1), "compute_wgs_bwd": (1, 2),
        "block_kv_dkv": (64, 128), "block_q_dq": (64, 128), "block_kv_dq": (64, 128),
    },
)  # fmt: skip
def _backward(head_dim: int, kv_heads: int, **given: Any) -> Any:
    module = ported("attention_mgpu")
    config = module.TuningConfig(64, 64, 2, block_q_dkv=64, **given)
    q = normal((1, 256, 2, head_dim), seed=3)
    k, v = (normal((1, 256, kv_heads, head_dim), seed=i) for i in (1, 2))
    expected = derivatives(module.attention_reference)(q, k, v)
    return derivatives(lambda *x: module.attention(*x, config)), (q, k, v), expected


# --- products on Blackwell ------------------------------------------------------------


@kernel(
    "blackwell_matmul",
    {
        # M, N, K, steps ahead, and whether two CTAs share it.
        "tile": (
            (128, 128, 64, 2, False), (128, 256, 64, 3, False), (128, 64, 32, 4, False),
            (128, 128, 64, 6, False), (128, 128, 64, 2, True), (128, 64, 32, 6, True),
        ),
        "tiles": (1, 2), "epilogue_tile_n": (64, 32), "dtype": _HALF, **_GRID,
    },
    target="sm_100a",
    alarm=lambda **_: "is freed while the copy|can miss its phase",
)  # fmt: skip
def _blackwell(tile: Any, tiles: int, dtype: Any, **given: Any) -> Any:
    module = ported("blackwell_matmul_mgpu")
    given["grid_minor_dim"] = module.MatmulDimension[given["grid_minor_dim"]]
    config = module.TuningConfig(*tile, **given)
    m, n, k, _, shared = tile
    a = normal((2 * m * (1 + shared), 2 * k), dtype)
    b = normal((2 * k, tiles * n * (1 + shared)), dtype, 1)
    return lambda *x: module.matmul_kernel(*x, config), (a, b), wide(a) @ wide(b)


@kernel(
    "blackwell_ragged_dot",
    {
        "tile_n": (64, 128), "max_concurrent_steps": (2, 4),
        "epilogue_tile_n": (64, 32), "tiles": (1, 2), **_GRID,
    },
    target="sm_100a",
    alarm=lambda tiles, **_: "load may still read it" if tiles > 1 else None,
)  # fmt: skip
def _blackwell_ragged(tile_n: int, tiles: int, **given: Any) -> Any:
    module = ported("blackwell_ragged_dot_mgpu")
    dims = module.blackwell_matmul_mgpu.MatmulDimension
    given["grid_minor_dim"] = dims[given["grid_minor_dim"]]
    config = module.TuningConfig(128, tile_n, 64, collective=True, **given)
    sizes = np.asarray([100, 412], np.int32)
    a, b = normal((512, 128)), normal((2, 128, 2 * tile_n * tiles), seed=1)
    call = module.ragged_dot_kernel
    return lambda *x: call(*x, config), (a, b, sizes), _by_group(a, b, sizes)


# --- for Triton -----------------------------------------------------------------------


@kernel("softmax", {"n": (77, 128, 6000), "dtype": _FLOATS, "rows": ((3,), (), (2, 3))})
def _softmax(n: int, dtype: Any, rows: tuple[int, ...]) -> Any:
    x = normal((*rows, n), dtype)
    return ported("softmax").softmax, (x,), jax.nn.softmax(wide(x))


_NORM = {"n": (200, 64, 5000), "dtype": _FLOATS, "backward": _BOOLS}


@kernel("rms_norm", {"name": ("rms_norm",), **_NORM})
@kernel("layer_norm", {"name": ("layer_norm",), **_NORM})
def _norm(name: str, n: int, dtype: Any, backward: bool) -> Any:
    function, reference = (
        getattr(ported(name), x) for x in (name, f"{name}_reference")
    )
    given = tuple(normal(s, dtype, i) for i, s in enumerate([(2, 3, n), (n,), (n,)]))
    if backward:
        function, reference = derivatives(function), derivatives(reference)
    return function, given, reference(*map(wide, given))


@kernel(
    "mha",
    {
        "head_dim": (64, 48, 128), "causal": _BOOLS, "segments": _BOOLS,
        "blocks": (
            (32,) * 6, (64,) * 6, (64, 64, 16, 32, 32, 16), (32, 64, 32, 32, 32, 32)
        ),
        "dtype": _HALF, "backward": _BOOLS,
    },
    # The two products of 32 rows have them in different warps.
    lane=lambda head_dim, blocks, backward, **_: (
        not backward and (head_dim < 128 or blocks[0] > 32)
    ),
)  # fmt: skip
def _mha(
    head_dim: int, blocks: Any, segments: bool, dtype: Any, backward: bool, causal: bool
) -> Any:
    module = ported("attention")
    q, k, v = (normal((2, 64, 2, head_dim), dtype, i) for i in (3, 1, 2))
    ids = host.array(np.repeat([[0] * 20 + [1] * 44], 2, 0)) if segments else None
    given = {"segment_ids": ids, "sm_scale": head_dim**-0.5, "causal": causal}
    sizes = module.BlockSizes(*blocks)
    function: Any = functools.partial(module.mha, **given, block_sizes=sizes)
    reference: Any = functools.partial(module.mha_reference, **given)
    if backward:
        function, reference = derivatives(function), derivatives(reference)
    return function, (q, k, v), reference(q, k, v)


@kernel(
    "decode",
    {
        "heads": (4, 16, 20), "kv_heads": (None, 1, 2), "bounds": _BOOLS,
        "return_residuals": _BOOLS, "splits": (4, 8),
    },
)  # fmt: skip
def _decode(heads: int, kv_heads: Any, bounds: bool, splits: int, **given: bool) -> Any:
    module = ported("decode_attention")
    name, own = ("gqa", (kv_heads,)) if kv_heads else ("mqa", ())
    q = normal((2, heads, 64))
    k, v = (normal((2, 256, *own, 64), seed=i) for i in (1, 2))
    ends = [np.asarray(x, np.int32) for x in ([3, 40], [90, 128])] if bounds else ()
    expected = getattr(module, f"{name}_reference")(q, k, v, *ends, **given)
    decode = getattr(module, name)
    return (
        lambda *x: decode(*x, k_splits=splits, block_k=32, **given),
        (q, k, v, *ends),
        expected,
    )


@kernel(
    "paged",
    {
        "heads": (8, 40), "quantized": _BOOLS, "bounded": (True, False),
        "attn_logits_soft_cap": (None, 10.0), "splits": (4, 1),
    },
)  # fmt: skip
def _paged(heads: int, quantized: bool, bounded: bool, splits: int, **given: Any):
    module = ported("paged_attention")
    q, *pages = (normal(s, seed=i) for i, s in enumerate([(2, heads, 64), *_PAGES]))
    table = np.random.default_rng(0).permutation(16).reshape(2, 8).astype(np.int32)
    lengths = np.asarray([100, 37], np.int32) if bounded else None
    scales: Any = (None, None)
    if quantized:
        pages = [host.array((wide(x) * 250).clip(-127, 127), jnp.int8) for x in pages]
        scales = (np.full((2, 16, 16), 1 / 250, np.float32),) * 2
    exact = [wide(x) / (250 if quantized else 1) for x in pages]
    k, v = (x[:, table].reshape(2, 2, 128, 64).transpose(1, 2, 0, 3) for x in exact)
    expected = module.paged_attention_reference(q, k, v, lengths, **given)
    how = {"k_splits": splits, "pages_per_compute_block": 2, **given}
    arguments = (q, *pages, table, lengths, *scales)
    return lambda *x: module.paged_attention(*x, **how), arguments, expected


_PAGES = [(2, 16, 16, 64)] * 2
