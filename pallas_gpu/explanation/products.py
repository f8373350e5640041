# SPDX-License-Identifier: Apache-2.0
"""Products: the instruction that each became, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from pallas_gpu import arch, types
from pallas_gpu.explanation.findings import BY_ID, SlowFinding
from pallas_gpu.explanation.model import Model
from pallas_gpu.lowering.notes import Conversion
from pallas_gpu.primitives.tensor_cores.mma import InsteadOfWgmma
from pallas_gpu.program.nodes import Access, Op
from pallas_gpu.program.walk import Site
from pallas_gpu.testing.work import PRODUCTS, macs_per_cycle, of_product

# Of wgmma's rate. Published microbenchmarks of the H100 find 60 to 65 %.
_MMA_SYNC_RATE = 0.62
_INSTRUCTIONS = {"wgmma": "wgmma", "mma": "mma.sync", "tcgen05_mma": "tcgen05.mma"}
# PTX ISA, wgmma.mma_async: N is a multiple of 8, an instruction consumes 32 bytes of K;
# 256 registers of each thread hold 128 x 256 sums.
_COLUMNS, _K_BYTES, _MOST_SUMS = 8, 32, 128 * 256


def products(model: Model) -> Iterator[SlowFinding]:
    """Yields a finding for each product: those at one line are one."""
    groups: dict[Any, list[Site]] = {}
    for site in model.sites:
        if site.op.name in PRODUCTS and model.executed.get(site.op):
            key = site.where, site.op.name, _dot(site.op), site.enclosing
            groups.setdefault(key, []).append(site)
    for sites in groups.values():
        yield _product(model, sites)


def _product(model: Model, sites: list[Site]) -> SlowFinding:
    site = sites[0]
    op, name = site.op, site.op.name
    m, n, k = _sizes(op)
    if len(sites) > 1:
        k *= len(sites)
    by_wgmma = sum(model.busy(x.op, of_product(x.op).tensor_cycles) for x in sites)
    a, b = op.operands["a"], op.operands["b"]
    got = f"{a.dtype}[{m}, {k}] {_place(a)} times {b.dtype}[{k}, {n}] {_place(b)}"
    facts = {"instruction": _INSTRUCTIONS[name], "m": m, "n": n, "k": k}
    common: dict[str, Any] = {
        "got": got,
        "at": model.place(site),
        "loops": model.loops(site),
        "facts": facts,
    }
    if name != "mma":
        what = f"a product is multiplied by {_INSTRUCTIONS[name]}"
        return SlowFinding(BY_ID["product"], what, seconds=by_wgmma, **common)
    moved = sum(
        model.busy(x.op, note.cycles)
        for x in sites
        for note in model.notes.found.get(x.op, {})
        if isinstance(note, Conversion) and instead_of_wgmma(x.op)
    )
    seconds = moved + sum(model.busy(x.op, _mma_cycles(x.op)) for x in sites)
    reason = _reason(model, op, (m, n, k))
    if reason is None:
        what = "a product is multiplied by mma.sync"
        return SlowFinding(BY_ID["product"], what, seconds=seconds, **common)
    why, gains = reason
    lost = max(seconds - by_wgmma, 0.0) if gains else 0.0
    return SlowFinding(
        BY_ID["mma-sync" if gains else "product"],
        why.what,
        hint=why.hint,
        seconds=seconds,
        lost_seconds=lost,
        **common,
    )


def instead_of_wgmma(op: Op) -> bool:
    """Whether mma.sync has the place of a wgmma: its operands are moved for it."""
    return op.name == "mma" and _dot(op) is not None


def _sizes(op: Op) -> tuple[int, int, int]:
    """M, N and K as the author has them, without padding."""
    a, result = op.operands["a"], op.operands.get("acc") or op.results[0]
    (*_, m, n), k = _shape(result), _shape(a)[-1]
    dot = _dot(op)
    if dot is not None and dot.outvars and len(dot.outvars[0].aval.shape) == 2:
        m, n = dot.outvars[0].aval.shape
    return m, n, k


def _shape(x: Any) -> tuple[int, ...]:
    return x.window.shape if isinstance(x, Access) else x.shape


def _place(x: Any) -> str:
    return f"in {x.space}" if isinstance(x, Access) else "in registers"


def _dot(op: Op) -> Any:
    """The equation of the author's product that an operation is part of."""
    return next((c for c in op.calls if c.params.get("name") == "dot_general"), None)


def _mma_cycles(op: Op) -> float:
    m, n = _shape(op.results[0])
    k = _shape(op.operands["a"])[-1]
    bits = types.itemsize_bits(op.operands["a"].dtype)
    return m * n * k / (_MMA_SYNC_RATE * macs_per_cycle(bits))


def _reason(
    model: Model, op: Op, mnk: tuple[int, int, int]
) -> tuple[InsteadOfWgmma, bool] | None:
    """Why wgmma does not multiply, and whether the kernel gains by what is to be done.

    None if the author has asked for mma.sync, or the target has no wgmma.
    """
    given = op.params.get("reason")
    if given is not None:
        return given, True
    if _dot(op) is None or not model.target.has(arch.Feature.WGMMA):
        return None
    m, n, k = mnk
    dtype = jnp.dtype(op.operands["a"].dtype)
    rows, k_elems = types.WGMMA_ROWS, _K_BYTES // dtype.itemsize
    if m % rows:
        padded = -(-m // rows) * rows
        # What mma.sync multiplies is padded, too.
        gains = padded * _MMA_SYNC_RATE < _shape(op.results[0])[0]
        why = InsteadOfWgmma(
            f"M = {m} is not a multiple of {rows}",
            f"pad M to {padded}, or give a CTA {padded} rows",
        )
        return why, gains
    if n % _COLUMNS:
        why = InsteadOfWgmma(f"N = {n} is not a multiple of {_COLUMNS}", "pad N")
        return why, True
    if k % k_elems:
        what = f"K = {k} is not a multiple of {k_elems}"
        return InsteadOfWgmma(what, "pad K with zeros"), True
    if m * n > _MOST_SUMS:
        why = InsteadOfWgmma(
            f"a warpgroup has no room for {m} x {n} sums",
            "multiply fewer columns at a time, or use more warpgroups",
        )
        return why, True
    return None
