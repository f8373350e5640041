# SPDX-License-Identifier: Apache-2.0
"""Runs a kernel's whole module on the CPU, for one device or for several.

Of a kernel on several devices the function of each gets the addresses of the buffers on
all of them, as XLA passes them: in GMEM and on the host, behind the buffers.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.lockstep.grids.host import Host, address_of, multimem_address_of
from pallas_gpu.lockstep.launch import Buffer

# Bits of the types of which several elements share a byte of a buffer.
_SUB_BYTE = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}


def run_module(
    module: ir.Module,
    operands: Sequence[np.ndarray],
    results: Sequence[Any],
    initial: Mapping[int, np.ndarray] | None = None,
    seed: int = 0,
) -> list[np.ndarray]:
    """Runs a whole kernel's module on one device; see `run_on_devices`."""
    (outputs,) = run_on_devices(module, [operands], results, [initial or {}], seed)
    return outputs


def run_on_devices(
    module: ir.Module,
    operands: Sequence[Sequence[np.ndarray]],
    results: Sequence[Any],
    initial: Sequence[Mapping[int, np.ndarray]],
    seed: int = 0,
    kept: Container[int] = (),
) -> list[list[np.ndarray]]:
    """Runs a whole kernel's module on each device.

    Args:
      module: as `pallas_gpu.lowering` gives it.
      operands: the arrays of each device.
      results: shapes and dtypes of what the kernel returns.
      initial: contents of the results that are operands, too, of each device.
      seed: decides the order in which copies complete.
      kept: the results that outlive a launch, which others may access after its end.

    Raises:
      NotModelled: it has an operation that the machine does not execute.
      PtxError: it breaks a rule of the PTX ISA.
    """
    devices, inputs = len(operands), len(operands[0])
    arrays: list[list[np.ndarray]] = []
    for own, contents in zip(operands, initial, strict=True):
        outputs = [np.zeros(t.shape, t.dtype) for t in results]
        for i, known in contents.items():
            outputs[i][...] = known
        arrays.append([*(np.array(x) for x in own), *outputs])
    buffers: list[Buffer] = []
    for device, each in enumerate(arrays):
        suffix = f" of device {device}" if devices > 1 else ""
        for i, array in enumerate(each):
            name = f"buffer {i}{suffix}"
            is_input, is_kept = i < inputs, i - inputs in kept
            buffers.append(
                Buffer(_bytes(array), name, device, i + 1, is_input, is_kept)
            )
    with module.context:
        _run(module, buffers, devices, seed)
    datas = iter(buffers)
    for array, buffer in zip((x for each in arrays for x in each), datas, strict=False):
        if _element_bits(array.dtype) < 8:
            elements = _elements(buffer.data, array.dtype, array.size)
            array[...] = elements.reshape(array.shape)
    return [each[inputs:] for each in arrays]


def _run(module: ir.Module, buffers: list[Buffer], devices: int, seed: int) -> None:
    """Runs the functions of all devices, then each launch on all of them."""
    count = len(buffers) // devices
    own = [list(range(d * count, (d + 1) * count)) for d in range(devices)]
    programs: list[Any] = []
    if devices == 1:
        launches = [Host(buffers, own[0], seed).run(module, programs)]
    else:
        for d in range(devices):
            own[d].append(len(buffers))
            data = np.array(_words(d, devices, count), np.int64).view(np.uint8)
            buffers.append(Buffer(data, f"the metadata of device {d}", d, 0, True))
        hosts = [Host(buffers, own[d], seed + d, d) for d in range(devices)]
        launches = [host.run(module, programs) for host in hosts]
    for parts in zip(*launches, strict=True):
        parts[0].launch.run(parts)


def _words(device: int, devices: int, count: int) -> list[int]:
    """What XLA tells a device of all of them.

    The rank of the device, three other words, the address of each buffer on each
    device, and the multimem address of each buffer.
    """
    addresses = [
        address_of(d * count + i) for i in range(count) for d in range(devices)
    ]
    multimem = [multimem_address_of(i + 1) for i in range(count)]
    return [device, 0, 0, 0, *addresses, *multimem]


def _element_bits(dtype: np.dtype) -> int:
    return _SUB_BYTE.get(dtype.name, 8 * dtype.itemsize)


def _bytes(x: np.ndarray) -> np.ndarray:
    """The buffer of an array: XLA packs elements of 2 and 4 bits, the first lowest."""
    bits = _element_bits(x.dtype)
    raw = x.reshape(-1).view(np.uint8)
    if bits >= 8:
        return raw
    # Whole words, of which the kernel's atomic operations change the last one, too;
    # bits after the last element are anything.
    padded = np.full(-(-raw.size * bits // 32) * 32 // bits, 0xFF, np.uint8)
    padded[: raw.size] = raw
    parts = (padded & (1 << bits) - 1).reshape(-1, 8 // bits)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.bitwise_or.reduce(parts << shifts, axis=1, dtype=np.uint8)


def _elements(data: np.ndarray, dtype: np.dtype, count: int) -> np.ndarray:
    bits = _element_bits(dtype)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (data[:, None] >> shifts & (1 << bits) - 1).astype(np.uint8)
    return codes.reshape(-1)[:count].view(dtype)
