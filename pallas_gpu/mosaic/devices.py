# SPDX-License-Identifier: Apache-2.0
"""References to the memory of other devices, and the executing device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.emitters import module
from pallas_gpu.emitters.devices import multimem, peers
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.gmem import GmemView
from pallas_gpu.mosaic.memory import memrefs
from pallas_gpu.mosaic.memory.memref_shapes import memref_slice
from pallas_gpu.mosaic.scalars import as_i32

# How `FragmentedArray.load_reduce_untiled` combines what the devices have.
MultimemReductionOp = Literal["add", "min", "max", "and", "or", "xor"]


def supports_cross_device_collectives() -> bool:
    """Returns whether kernels of this process can access other devices' memory.

    They can on several GPUs of one process, and, in the emulator, on several CPU
    devices of one process.
    """
    devices = jax.devices()
    return len(devices) > 1 and len(devices) == jax.local_device_count()


class GlobalBroadcast:
    """The array of every device."""


GLOBAL_BROADCAST = GlobalBroadcast()


@dataclasses.dataclass(frozen=True)
class MultimemRef:
    """A reference to the arrays of all devices at once.

    Only `store`, `FragmentedArray.store_untiled` and `load_reduce_untiled` access it.

    Attributes:
      ref: the memref, whose address is a multimem address.
    """

    ref: ir.Value

    @property
    def type(self) -> ir.Type:
        """That of the memref."""
        return ir.MemRefType(self.ref.type)

    def store(self, value: ir.Value, indices: Sequence[ir.Value]) -> None:
        """Stores a scalar or a vector of 32, 64 or 128 bits to all devices.

        PTX: `multimem.st.relaxed.sys.global`. Since: sm_90.
        """
        if not isinstance(value.type, ir.VectorType):
            value = dtypes.pack([value])
        pointer = memrefs.memref_ptr(memref_slice(self.ref, tuple(indices)))
        multimem.store(value, pointer, None)


def require_device_code(what: str, on_host: bool) -> None:
    """Raises UnsupportedError for code of the host, or for a kernel of one device."""
    _require_devices(what)
    if on_host:
        raise errors.UnsupportedError(
            f"{what}: code for the host",
            expected="on_host=False",
            got="on_host=True",
            hint="leave it out: copies make the tensor maps of all devices' arrays",
        )


def owner_of(peer: Any, what: str) -> peers.Owner:
    """Returns whose memory a peer's id, or GLOBAL_BROADCAST, names."""
    _require_devices(what)
    return peers.ALL if isinstance(peer, GlobalBroadcast) else as_i32(peer)


def moved(view: GmemView, owner: peers.Owner) -> GmemView:
    """Returns the same part of the same array in another device's memory.

    Raises:
      MemorySpaceError: the array is not a parameter of the kernel.
    """
    if module.current().spec.devices == 1:
        return view
    if view.buffer_index is None or view.owner is not None:
        raise errors.MemorySpaceError(
            "Other devices do not have the array",
            expected="a parameter of the kernel, in this device's memory",
            got="an address that is not in a kernel buffer"
            if view.buffer_index is None
            else "an array of another device",
        )
    pointer = peers.address(view.buffer_index, owner)
    return dataclasses.replace(view, pointer=pointer, owner=owner)


def reference(ref: ir.Value, peer: Any, what: str) -> ir.Value:
    """Returns the memref of the same part of an array on another device, or on all."""
    owner, view = owner_of(peer, what), memrefs.view_of(ref)
    if not isinstance(view, GmemView):
        raise errors.MemorySpaceError(
            f"{what}: the reference is not to GMEM",
            expected="a memref in GMEM",
            got=str(ref.type),
        )
    return memrefs.memref_of(moved(view, owner))


def _require_devices(what: str) -> None:
    if module.current().spec.devices == 0:
        raise errors.UnsupportedError(
            f"{what}: the kernel accesses the memory of its own device alone",
            expected="a kernel under jax.shard_map of which an operation reaches other "
            "devices",
            got="none",
            hint="pass plgpu.remote_ref(ref, device) to the code: "
            "plgpu.inline_mgpu(...)(..., plgpu.remote_ref(ref, device))",
        )
