# SPDX-License-Identifier: Apache-2.0
"""The executing device, and the addresses of buffers on other devices.

XLA passes two more pointers behind a kernel's buffers, to the same words in the memory
of the device and of the host (observed in the modules of JAX's own kernels): the rank
of the device, three others, the address of each buffer on each device, and a multimem
address of each buffer.
"""

from __future__ import annotations

from typing import Literal

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_gpu.emitters import module, operations
from pallas_gpu.emitters.elements import arith

# Whose memory: that of a device, or that of all of them.
type Owner = ir.Value | int | Literal["all"]
ALL: Literal["all"] = "all"

_HEADER_WORDS = 4
_WORD_BYTES = 8


def word_of(devices: int, buffer: int, device: int = 0) -> int:
    """The number of the word that has the address of a buffer on a device."""
    return _HEADER_WORDS + devices * buffer + device


def multimem_word_of(devices: int, buffers: int, buffer: int) -> int:
    """The number of the word that has a multimem address of a buffer."""
    return word_of(devices, buffers) + buffer


def load_word(words: ir.Value, number: int, device: ir.Value | None = None) -> ir.Value:
    """Loads a word, i64, or the one that is a device's number behind it."""
    place = operations.offset(words, number * _WORD_BYTES) if number else words
    if device is not None:
        i64 = ir.IntegerType.get_signless(64)
        distance = arith.muli(
            arith.extsi(i64, device), operations.constant(i64, _WORD_BYTES)
        )
        place = operations.offset(place, distance)
    return llvm.load(ir.IntegerType.get_signless(64), place, invariant=True)


def _as_pointer(address: ir.Value) -> ir.Value:
    """An address in GMEM, i64, as `!llvm.ptr`, which LLVM knows to be in GMEM."""
    in_gmem = llvm.inttoptr(module.pointer_type(1), address)
    return llvm.addrspacecast(module.pointer_type(), in_gmem)


def rank() -> ir.Value:
    """i32: the logical id of the executing device. PTX: `ld.global`."""
    kernel = module.current()
    if kernel.spec.devices <= 1:
        return kernel.i32(0)

    def emit() -> ir.Value:
        word = load_word(kernel.device_words, 0)
        return arith.trunci(ir.IntegerType.get_signless(32), word)

    return kernel.hoisted("rank", emit)


def address(buffer: int, owner: Owner) -> ir.Value:
    """The address of a buffer on another device, or on all. PTX: `ld.global`."""
    kernel = module.current()
    devices, words = kernel.spec.devices, kernel.device_words
    match owner:
        case "all":
            number = multimem_word_of(devices, kernel.spec.num_buffers, buffer)
            word = load_word(words, number)
        case int():
            word = load_word(words, word_of(devices, buffer, owner))
        case _:
            word = load_word(words, word_of(devices, buffer), owner)
    pointer = _as_pointer(word)
    kernel.owned[pointer] = buffer, owner
    return pointer


def listed(addresses: ir.Value, owner: Owner | None) -> ir.Value:
    """The address of an array of a device, by default the executing one, from a list.

    PTX: `ld.global`.

    Args:
      addresses: `!llvm.ptr` of the addresses of the array on all devices.
    """
    if isinstance(owner, int):
        return _as_pointer(load_word(addresses, owner))
    return _as_pointer(load_word(addresses, 0, rank() if owner is None else owner))
