# SPDX-License-Identifier: Apache-2.0
"""Whether a loop copies ahead without being asked, and how many stages it has.

Copies pay where products wait for what the loop loads: of 2 KiB or more, all of which
can be copied. A loop takes two stages, where their buffers leave the SM as many blocks
as registers do; more have not been faster, while the blocks of an SM overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallas_gpu import _jax, types
from pallas_gpu.arch.residency import Residency
from pallas_gpu.entry import assumed_target, control
from pallas_gpu.entry.plain import stages
from pallas_gpu.entry.plain.sources import LOADS, Loaded
from pallas_gpu.program.bodies import Equations, bodies, equations
from pallas_gpu.types.mesh import WARPGROUP_THREADS

_LOOPS = ("scan", "while")
_STAGES, _LEAST_BYTES = 2, 2048
# Registers of a thread for addresses, and for arrays between the products.
_OTHER_REGISTERS = 96


def may_pay(eqn: _jax.JaxprEqn) -> bool:
    """Whether an equation is a loop with products, and with large loads from GMEM."""
    if eqn.primitive.name not in _LOOPS:
        return False
    inside = equations(bodies(eqn)[-1].jaxpr)
    if not any(x.primitive.name == "dot_general" for x in inside):
        return False
    return any(map(_is_large_load, inside))


def _is_large_load(eqn: _jax.JaxprEqn) -> bool:
    if eqn.primitive not in LOADS or not _is_large(eqn.outvars[0].aval):
        return False
    return getattr(Loaded.of(eqn).ref.aval, "memory_space", None) is types.GMEM


def uncounted(eqn: _jax.JaxprEqn) -> list[tuple[str, str]]:
    """Returns the lines of the loads of a loop that does not count, each with why."""
    why = "its loop runs until something else than `index < bound` is false"
    if eqn.primitive.name == "scan":
        why = "its loop slices or stacks arrays: let it carry, read and store parts"
    loads = (x for x in Equations(bodies(eqn)[-1].jaxpr).listed if _is_large_load(x))
    return [(where, why) for where in map(_jax.where, loads) if where]


def smem_bytes(jaxpr: _jax.Jaxpr) -> int:
    """Returns the bytes of SMEM that a kernel declares, in all scopes together.

    Loops that ask for copies ahead count with all that they load.
    """
    total = 0
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "run_scoped":
            refs = [v.aval for v in bodies(eqn)[0].jaxpr.invars]
            spaces = [getattr(ref, "memory_space", None) for ref in refs]
            pairs = zip(refs, spaces, strict=True)
            total += sum(_bytes(ref) for ref, space in pairs if space is types.SMEM)
        slots = eqn.params.get("num_stages") or 1
        if eqn.primitive is control.staged_loop_p and slots > 1:
            inside = Equations(bodies(eqn)[0].jaxpr).listed
            loads = [x for x in inside if x.primitive in LOADS]
            avals = [x.outvars[0].aval for x in loads]
            total += slots * sum(_bytes(x) for x in avals if x.shape)
    return total


def num_stages(
    body: stages.LoopBody,
    loads: Sequence[stages.Load],
    trips: Any,
    mesh: types.Mesh,
    used_bytes: int,
    asked: int | None,
) -> int:
    """Returns the number of stages of a loop that copies some of its loads ahead.

    Args:
      loads: those that copies can replace.
      trips: the number of iterations.
      mesh: the kernel's.
      used_bytes: SMEM that the kernel has without the buffers.
      asked: the number that the kernel's parameters have; None: it is chosen.

    Raises:
      RefusedError: the loop stays as it is.
    """
    products = [x for x in body.equations if x.primitive.name == "dot_general"]
    if not products:
        raise stages.RefusedError("no product of its own reads what the loop loads")
    for site, why in body.refused:
        if _is_large(site.eqn.outvars[0].aval):
            raise stages.RefusedError(f"another load stays ({site.where}): {why}")
    copied = {load.eqn.outvars[0] for load in loads}
    # Right operands that are values are stored to SMEM for the product.
    stored = sum(
        _bytes(x.invars[1].aval) for x in products if x.invars[1] not in copied
    )
    ring = sum(_bytes(load.result) for load in loads) * mesh.warpgroups
    most = _STAGES if asked is None else asked
    if isinstance(trips, int):
        most = min(most, trips - 1 if asked is None else trips)
    target = assumed_target.of_kernel()
    threads = WARPGROUP_THREADS * mesh.warpgroups
    blocks = 1
    if asked is None:
        held = [v.aval for v in body.carried if not isinstance(v, _jax.Literal)]
        held.append(max((x.outvars[0].aval for x in products), key=_bytes))
        if all(x.outvars[0].aval.shape[0] % 64 for x in products):
            # mma.sync has its operands in registers.
            held += [load.result for load in loads]
        each = sum(map(_bytes, held)) // (4 * WARPGROUP_THREADS)
        registers = _OTHER_REGISTERS + each
        blocks = max(target.registers_per_sm // (min(registers, 255) * threads), 1)
        without = Residency.of(target, used_bytes, threads, 1).ctas_per_sm
        blocks = min(blocks, without)
    for n in range(most, 1, -1):
        total = used_bytes + stored + n * (ring + 8) + 1024
        fits = Residency.of(target, total, threads, 1).ctas_per_sm
        if fits >= blocks and total <= target.smem_bytes_per_block:
            return n
    if most < 2:
        raise stages.RefusedError(f"the loop has {trips} iterations only")
    raise stages.RefusedError(
        f"two buffers of {ring:,} bytes leave an SM fewer blocks than {blocks}"
    )


def is_worth(load: stages.Load) -> bool:
    """Whether a load is large enough to be copied without being asked."""
    return _is_large(load.result)


def _is_large(aval: Any) -> bool:
    return bool(getattr(aval, "shape", ())) and _bytes(aval) >= _LEAST_BYTES


def _bytes(aval: Any) -> int:
    return aval.size * types.itemsize_bits(aval.dtype) // 8
