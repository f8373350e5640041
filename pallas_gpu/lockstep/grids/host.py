# SPDX-License-Identifier: Apache-2.0
"""The host function of a module, run with integers for values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep import accesses, values
from pallas_gpu.lockstep.copies import descriptors, tma
from pallas_gpu.lockstep.launch import MULTIMEM, Buffer, Launch, Part, Shape
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.program import Program

# Host memory: the number of an allocation, and a byte in it.
_HOST_SHIFT = 56


class Host:
    """The host function of a module, run with integers for values.

    Args:
      buffers: of all devices; the function adds memory of the module, and parameters.
      own: the numbers of those that the function gets, counted from 0.
      seed: decides the order in which copies complete.
      device: the number of the device; None for the only one.
    """

    def __init__(
        self,
        buffers: list[Buffer],
        own: Sequence[int],
        seed: int = 0,
        device: int | None = None,
    ) -> None:
        self._buffers = buffers
        self._own = own
        self._seed = seed
        self._device = device
        self._parts: list[Part] = []
        self._values: dict[ir.Value, Any] = {}
        self._memory: dict[int, int] = {}
        self._tensor_maps: list[tma.TensorMap] = []
        self._descriptors: dict[int, int] = {}
        self._globals: dict[str, int] = {}
        self._allocations = 1
        self._is_early = False

    def run(self, module: ir.Module, programs: list[Program]) -> list[Part]:
        """Runs the function that has a body; returns its launches, which have not run.

        Args:
          module: the module.
          programs: those of the launches, added by the first device's function.
        """
        self._programs = programs
        self._is_early = "mosaic_gpu.uses_pdl" in module.operation.attributes
        (function,) = (
            op
            for op in module.body.operations
            if op.operation.name == "func.func" and len(op.regions[0].blocks)
        )
        block = function.regions[0].blocks[0]
        table = 1 << _HOST_SHIFT
        pointers = [address_of(i) for i in self._own]
        if self._device is not None:
            # XLA's addresses of buffers for the host, which a replay does not read.
            pointers.append(0)
        for op in module.body.operations:
            self._allocate(op.operation)
        for i, pointer in enumerate(pointers):
            self._memory[table + 8 * i] = pointer
        self._values[block.arguments[0]] = 0
        self._values[block.arguments[1]] = table
        for op in block.operations:
            self._step(op.operation)
        return self._parts

    def _allocate(self, op: ir.Operation) -> None:
        """Gives the device memory for a global of the module in GMEM."""
        if op.name != "llvm.mlir.global":
            return
        if ir.IntegerAttr(op.attributes["addr_space"]).value == 1:
            name = ir.StringAttr(op.attributes["sym_name"]).value
            kind = str(ir.TypeAttr(op.attributes["global_type"]).value)
            data = np.zeros(_array_bytes(kind), np.uint8)
            self._globals[name] = self._add(data, name, is_input=False)

    def _add(self, data: np.ndarray, name: str, is_input: bool) -> int:
        """Adds a buffer of the device; returns its address."""
        device = self._device or 0
        name += "" if self._device is None else f" of device {device}"
        self._buffers.append(Buffer(data, name, device, 0, is_input))
        return address_of(len(self._buffers) - 1)

    def _step(self, op: ir.Operation) -> None:
        inputs = [self._values[x] for x in op.operands]
        match op.name:
            case "func.return":
                return
            case "gpu.launch":
                return self._launch(op, inputs)
            case "func.call":
                return self._call(op, inputs)
            case "llvm.store":
                self._memory[inputs[1]] = inputs[0]
                return None
            case "scf.if":
                if inputs[0]:
                    raise PtxError("the host function refuses a tensor map")
                return None
        self._values[op.results[0]] = self._result(op, inputs)
        return None

    def _result(self, op: ir.Operation, inputs: list[Any]) -> Any:
        match op.name:
            case "arith.constant":
                constant = values.constant(op.attributes["value"], op.results[0].type)
                return constant[0].item() if constant.shape == (1,) else None
            case "builtin.unrealized_conversion_cast" | "llvm.inttoptr":
                return inputs[0]
            case "arith.cmpi" if ir.IntegerAttr(op.attributes["predicate"]).value == 1:
                return inputs[0] != inputs[1]
            case "llvm.getelementptr":
                (index,) = ir.DenseI32ArrayAttr(op.attributes["rawConstantIndices"])
                kind = str(ir.TypeAttr(op.attributes["elem_type"]).value)
                return inputs[0] + index * (1 if kind == "i8" else 8)
            case "llvm.alloca":
                self._allocations += 1
                return self._allocations << _HOST_SHIFT
            case "llvm.load" if "!llvm.array" in (kind := str(op.results[0].type)):
                # The array by value: nobody writes it afterwards.
                size = _array_bytes(kind)
                data = descriptors.parameters(
                    self._descriptors, self._tensor_maps, inputs[0], size
                )
                return self._add(data, "the parameters", is_input=True)
            case "llvm.load":
                if inputs[0] not in self._memory:
                    raise PtxError("the host reads what it has not been given")
                return self._memory[inputs[0]]
        raise NotModelled(op.name, str(op))

    def _call(self, op: ir.Operation, inputs: list[int]) -> None:
        name = str(op.attributes["callee"])
        encoders = {
            "@cuTensorMapEncodeTiled": self._encode,
            "@cuTensorMapEncodeIm2col": self._encode_windows,
        }
        if name in encoders:
            self._values[op.results[0]] = encoders[name](inputs)
            return
        if name != "@mosaic_gpu_init_tma_desc":
            raise NotModelled(f"func.call {name}")
        place, base, code, rank, sizes, strides, swizzle, box = inputs
        if place % 64:
            raise PtxError("a tensor map is not aligned to 64 bytes")
        lists = [
            [self._memory[start + 8 * i] for i in range(rank)]
            for start in (sizes, strides, box)
        ]
        self._encoded(
            place,
            tma.TensorMap.encode(base, code, lists[0], lists[1], swizzle, lists[2]),
        )

    def _encoded(self, place: int, tensor_map: tma.TensorMap) -> None:
        self._descriptors[place] = len(self._tensor_maps)
        self._tensor_maps.append(tensor_map)

    def _reader(
        self, place: int, rank: int, steps: int
    ) -> Callable[[int, int, int], list[int]]:
        """Returns what reads numbers for a tensor map, and refuses strange ones."""
        if place % 64:
            raise PtxError("a tensor map is not aligned to 64 bytes")

        def read(start: int, count: int, width: int) -> list[int]:
            return [self._memory[start + width * i] for i in range(count)]

        if read(steps, rank, 4) != [1] * rank:
            raise NotModelled("element strides of a tensor map")
        return read

    def _encode(self, inputs: list[int]) -> int:
        """cuTensorMapEncodeTiled (CUDA driver API); 0 is success."""
        place, element, rank, base, sizes, strides, box, steps, *modes = inputs
        read = self._reader(place, rank, steps)
        made = tma.TensorMap.encoded_by_driver(
            base, element, read(sizes, rank, 8), read(strides, rank - 1, 8),
            read(box, rank, 4), modes,
        )  # fmt: skip
        self._encoded(place, made)
        return 0

    def _encode_windows(self, inputs: list[int]) -> int:
        """cuTensorMapEncodeIm2col (CUDA driver API); 0 is success."""
        place, element, rank, base, sizes, strides, *rest = inputs
        lower, upper, channels, pixels, steps, *modes = rest
        read = self._reader(place, rank, steps)
        ends = [read(x, rank - 2, 4) for x in (lower, upper)]
        corners = np.array(ends, np.uint32)
        made = tma.WindowsMap.encoded(
            base, element, read(sizes, rank, 8), read(strides, rank - 1, 8),
            corners.astype(np.int32).tolist(), (channels, pixels), modes,
        )  # fmt: skip
        self._encoded(place, made)
        return 0

    def _launch(self, op: ir.Operation, inputs: list[Any]) -> None:
        groups = list(ir.DenseI32ArrayAttr(op.attributes["operandSegmentSizes"]))
        dependencies, rest = groups[0], inputs[groups[0] :]
        del dependencies
        grid, block, more = tuple(rest[:3]), tuple(rest[3:6]), rest[6:]
        cluster = (1, 1, 1)
        if groups[7]:
            cluster, more = tuple(more[:3]), more[3:]
        (smem_bytes,) = more or [0]
        shape = Shape(grid, cluster, block, smem_bytes)
        if len(self._parts) == len(self._programs):
            self._programs.append(Program(op.regions[0].blocks[0]))
        program = self._programs[len(self._parts)]
        # Values of the host that the kernel uses: pointers, and the array of tensor
        # maps, for which the address of the parameters stands.
        known = {
            program.slot(value): _of_the_host(value, number)
            for value, number in self._values.items()
        }
        launch = Launch(
            self._buffers,
            self._tensor_maps,
            self._is_early,
            self._seed,
            self._device,
            self._globals,
        )
        self._parts.append(Part(launch, program, shape, known))


def _array_bytes(kind: str) -> int:
    """The size of an array of bytes, from its type's text."""
    return int(kind.removeprefix("!llvm.array<").split(" x ")[0])


def address_of(buffer: int) -> int:
    """The address of a buffer in GMEM, counted from 0."""
    return (buffer + 1) << accesses.BUFFER_SHIFT


def multimem_address_of(number: int) -> int:
    """The multimem address of the buffers of a number."""
    return (MULTIMEM + number) << accesses.BUFFER_SHIFT


def _of_the_host(value: ir.Value, number: Any) -> np.ndarray:
    """What the kernel sees of a value of the host function."""
    owner = value.owner
    if not isinstance(owner, ir.Block) and owner.name == "arith.constant":
        return values.constant(owner.attributes["value"], value.type)
    return np.array([number], np.int64)
