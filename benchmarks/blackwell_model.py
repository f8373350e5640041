# SPDX-License-Identifier: Apache-2.0
"""Matrix products for Blackwell, ours and upstream's: counts per tile, and bounds.

Also of products with scales of blocks, which have no counterpart upstream.

JAX_PLATFORMS=cpu python -m benchmarks.blackwell_model [--json]

Nothing runs on a card. Both kernels are compiled offline for sm_100a, the instructions
of one output tile in the steady state are counted in their PTX (`ptx_loops`), and a
model of throughputs gives a bound on the clocks of a tile. It has these throughputs of
an SM, per clock:

- Tensor core: 8192 floating-point operations on 16-bit operands, twice Hopper's. The
  data sheet of NVIDIA's HGX B200 has 2.25 PFLOP/s, dense, for one GPU: over 148 SMs
  that is a clock of 1.86 GHz. H100's has 989.4 TFLOP/s: over 132 SMs, with 4096, 1.83
  GHz. On 8-bit operands it has twice as many, on 4-bit ones four times: 4.5 and 9
  PFLOP/s in the same sheet.
- SMEM: 128 bytes, 32 banks of 32 bits (CUDA programming guide, "Shared memory"). The
  operands of products are read from it, TMA writes them, and the epilogue writes the
  result, which TMA reads. Whether TMA's accesses take part in the 128 bytes is not
  published, so there are two bounds: for reads of operands alone, and for everything.
- Schedulers: four, which each issue one instruction of a warp (CUDA programming guide,
  "Compute capability 10.0").

Where the next tile's products wait for a part of the epilogue, that part's instructions
of a warp are added to the clocks of a tile.

Latencies are not modelled, nor are the L2 cache, its way to the SMs and the power
limit, for which there are no published figures: the share of the peak is an upper
bound. The bytes that each SM loads per clock are in the table, to compare with such a
figure.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import blackwell_matmul_mgpu

import pallas_gpu as plgpu
from benchmarks import ptx_loops, timing
from benchmarks.lowering import upstream_blackwell
from pallas_gpu import arch, ops
from tests.support.differential import sides

TARGET = arch.SM_100A
FLOPS_PER_CLOCK = 8192
SMEM_BYTES_PER_CLOCK = 128
SCHEDULERS = 4
RESULT_BYTES = 2
# One tcgen05.mma has 32 bytes of K.
MMA_K_BITS = 256


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one SM computes at a time.

    Attributes:
      m, n, k: size of its output tile, and depth of the product.
      step_k: depth of one buffer of the ring.
      ctas: CTAs that multiply together: each loads its part of B's columns.
      bits: width of an element.
      block: elements along K that share a scale; each CTA loads the scales of its rows
        and of all columns. None: no scales.
      load_n: columns for each load of the epilogue from TMEM.
      shared_n: columns of the accumulator that the epilogue has to read before the next
        tile's products start.
    """

    m: int
    n: int
    k: int
    step_k: int
    ctas: int
    bits: int = 16
    block: int | None = None
    load_n: int = 32
    shared_n: int = 0

    @property
    def markers(self) -> dict[str, int]:
        """How often the tile needs what marks each role."""
        return {
            "load": (4 if self.block else 2) * (self.k // self.step_k),
            "multiply": self.k * self.bits // MMA_K_BITS,
            "store": self.n // self.load_n,
        }

    @property
    def operand_bytes(self) -> int:
        """Of A, B and scales in this SM's SMEM: written by TMA once, and read once."""
        operands = (self.m + self.n // self.ctas) * self.k * self.bits // 8
        if self.block is None:
            return operands
        return operands + (self.m + self.n) * self.k // self.block

    @property
    def tensor_clocks(self) -> float:
        """Of the tensor core."""
        return 2 * self.m * self.n * self.k / (FLOPS_PER_CLOCK * 16 / self.bits)

    @property
    def read_clocks(self) -> float:
        """Of SMEM, for the operands of products."""
        return self.operand_bytes / SMEM_BYTES_PER_CLOCK

    @property
    def smem_clocks(self) -> float:
        """Of SMEM, for all accesses."""
        result = self.m * self.n * RESULT_BYTES
        return 2 * (self.operand_bytes + result) / SMEM_BYTES_PER_CLOCK

    def waves(self, m: int, n: int) -> float:
        """The share of SMs that are busy, over all rounds of tiles."""
        tiles = m * n // (self.m * self.n)
        return tiles / (math.ceil(tiles / TARGET.sm_count) * TARGET.sm_count)


@dataclasses.dataclass(frozen=True)
class Counts:
    """What a kernel executes for one tile in the steady state.

    Attributes:
      roles: of the warps that load, that multiply and that store: the executions of
        each mnemonic in one warp.
      expected_bytes: what barriers are told to expect of copies, None where each thread
        tells a part of it.
    """

    roles: dict[str, collections.Counter[str]]
    expected_bytes: int | None

    @classmethod
    def of(cls, ptx: str, tile: Tile) -> Counts:
        """Counts in the PTX of a kernel."""
        program = ptx_loops.Program(ptx)
        executed = {r: program.per_tile(r, n) for r, n in tile.markers.items()}
        roles = {role: program.counts(blocks) for role, blocks in executed.items()}
        return cls(roles, program.bytes_expected(executed["load"]))

    def count(self, role: str, *prefixes: str) -> int:
        """The instructions of a warp of a role with one of some prefixes."""
        found = self.roles[role].items()
        return sum(times for name, times in found if name.startswith(prefixes))

    def total(self, role: str) -> int:
        """All instructions of a warp of a role."""
        return self.roles[role].total()

    @property
    def issue_clocks(self) -> int:
        """Of the scheduler that issues most: a warp of the epilogue, and another."""
        return self.total("store") + max(self.total("load"), self.total("multiply"))

    def exposed_clocks(self, tile: Tile) -> float:
        """Of the part of the epilogue for which the next products wait."""
        return self.total("store") * tile.shared_n / tile.n


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A kernel for products of (size, size) bfloat16 matrices."""

    tile: Tile
    ptx: Callable[[], str]

    @functools.cached_property
    def counts(self) -> Counts:
        """In its PTX."""
        return Counts.of(self.ptx(), self.tile)


def candidates(size: int) -> dict[str, Candidate]:
    """Returns the kernels by name."""
    square = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
    alone = ops.BlackwellMatmulConfig()
    pairs = dataclasses.replace(alone, collective=True, stages=6)

    def tile(config: ops.BlackwellMatmulConfig) -> Tile:
        return Tile(128, config.tile_n, size, config.tile_k, config.ctas)

    def ours(config: ops.BlackwellMatmulConfig) -> str:
        product = functools.partial(ops.matmul, config=config)
        (report,) = plgpu.offline.compile(product, square, square, target=TARGET)
        return report.ptx

    def theirs(config: ops.BlackwellMatmulConfig) -> str:
        kernel = blackwell_matmul_mgpu.matmul_kernel
        product = functools.partial(kernel, config=upstream_blackwell(config))
        return sides.upstream(TARGET).ptx(product, square, square)

    return {
        name + kind: Candidate(tile(config), functools.partial(compiled, config))
        for kind, config in (("", alone), (", pairs of CTAs", pairs))
        for name, compiled in (("pallas_gpu", ours), ("upstream", theirs))
    }


def scaled_candidates(size: int) -> dict[str, Candidate]:
    """Returns the kernels for blocks with scales, by name."""
    kinds = {
        "mxf8": (jnp.float8_e4m3fn, jnp.float8_e8m0fnu, 32),
        "nvf4": (jnp.float4_e2m1fn, jnp.float8_e4m3fn, 16),
    }
    alone = ops.BlockScaledMatmulConfig()
    configs = {"": alone, ", pairs": dataclasses.replace(alone, collective=True)}

    def ours(config: ops.BlockScaledMatmulConfig, kind: str) -> str:
        dtype, scale, block = kinds[kind]
        square = jax.ShapeDtypeStruct((size, size), dtype)
        scales = jax.ShapeDtypeStruct((size, size // block), scale)
        product = functools.partial(
            ops.block_scaled_matmul, preferred_element_type=jnp.bfloat16, config=config
        )
        operands = square, square, scales, scales
        (report,) = plgpu.offline.compile(product, *operands, target=TARGET)
        return report.ptx

    def tile(config: ops.BlockScaledMatmulConfig, kind: str) -> Tile:
        dtype, _, block = kinds[kind]
        n, bits = config.tile_n, jnp.finfo(dtype).bits
        depth = 128 * 8 // bits
        half = n // 2
        return Tile(128, n, size, depth, config.ctas, bits, block, 16, half)

    return {
        kind + suffix: Candidate(
            tile(config, kind), functools.partial(ours, config, kind)
        )
        for kind in kinds
        for suffix, config in configs.items()
    }


def counted(name: str, candidate: Candidate) -> dict[str, Any]:
    """Returns a row of the table of counts."""
    counts, tile = candidate.counts, candidate.tile
    arrive = "mbarrier.arrive"
    roles = "load", "multiply", "store"
    return {
        "kernel": name,
        "products": counts.count("multiply", "tcgen05.mma"),
        "commits": counts.count("multiply", "tcgen05.commit"),
        "bytes loaded": tile.operand_bytes,
        "copies": counts.count("load", "cp.async.bulk.tensor"),
        "waits": " / ".join(str(counts.count(r, "mbarrier.try_wait")) for r in roles),
        "arrivals": " / ".join(str(counts.count(r, arrive)) for r in roles),
        "TMEM loads": counts.count("store", "tcgen05.ld"),
        "barriers of threads": counts.count("store", "bar.sync", "barrier.sync"),
        "instructions": " / ".join(str(counts.total(r)) for r in roles),
    }


def modelled(name: str, candidate: Candidate, size: int) -> dict[str, Any]:
    """Returns a row of the table of bounds."""
    tile, issue = candidate.tile, candidate.counts.issue_clocks
    peak = tile.tensor_clocks
    busy, exposed = tile.waves(size, size), candidate.counts.exposed_clocks(tile)
    least = max(peak, tile.read_clocks, issue) + exposed
    most = max(peak, tile.smem_clocks, issue) + exposed
    return {
        "kernel": name,
        "m, n, k": ", ".join([str(size)] * 3),
        "tensor core": int(peak),
        "SMEM, operands": int(tile.read_clocks),
        "SMEM, all": int(tile.smem_clocks),
        "issue": issue,
        "epilogue waited for": int(exposed),
        "bytes of L2 per clock": tile.operand_bytes / least,
        "SMs busy": busy,
        "share of peak": f"{busy * peak / most:.2f} to {busy * peak / least:.2f}",
    }


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    kernels = {size: candidates(size) for size in (4096, 8192)}
    timing.report(
        "Counts of one tile of 128x256, K = 4096",
        [counted(name, kernel) for name, kernel in kernels[4096].items()],
        "Steady state; a / b / c: in the warp that loads, that multiplies, and in each "
        "of the four that store.",
        options.json,
    )
    rows = [
        modelled(name, kernel, size)
        for size, each in kernels.items()
        for name, kernel in each.items()
    ]
    notes = "Clocks of one tile by the model; nothing was run."
    timing.report("Bounds", rows, notes, options.json)
    scaled = {size: scaled_candidates(size) for size in (4096, 8192)}
    timing.report(
        "Counts of one tile of 128x256 with scales, K = 4096",
        [counted(name, kernel) for name, kernel in scaled[4096].items()],
        "As above.",
        options.json,
    )
    rows = [
        modelled(name, kernel, size)
        for size, each in scaled.items()
        for name, kernel in each.items()
    ]
    timing.report("Bounds with scales", rows, notes, options.json)


if __name__ == "__main__":
    main()
