# SPDX-License-Identifier: Apache-2.0
"""TMA descriptors: tagged operations in the kernel, and host code to initialize them.

A kernel body refers to a descriptor by a tagged operation on the buffer that it
describes. Before the module is serialized, `lower_tensor_maps` assigns equal
descriptors one slot in a host array, emits host code that initializes each slot through
the launcher's runtime function, and passes the array to the kernel by value (a `.param`
that TMA can read); those of other devices' buffers the kernel makes from them. The
runtime function takes no fill mode: for a fill with NaN the CUDA driver encodes the
slot again, through the driver's functions that the launcher's library exports.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, Literal

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import builtin, func, llvm, scf

from pallas_gpu import errors
from pallas_gpu.emitters import module, operations
from pallas_gpu.emitters.devices import descriptors, peers
from pallas_gpu.emitters.devices.descriptors import BYTES as DESCRIPTOR_BYTES
from pallas_gpu.emitters.elements import arith, dtypes
from pallas_gpu.emitters.program import order as program_order

TAG = "tensor_map"
INIT_FUNCTION = "mosaic_gpu_init_tma_desc"
# CUDA driver API; both ends of the supported range of jax export it beside the above.
ENCODE_FUNCTION = "cuTensorMapEncodeTiled"
IM2COL_FUNCTION = "cuTensorMapEncodeIm2col"
# CUtensorMap is 64-byte aligned (CUDA driver API).
DESCRIPTOR_ALIGNMENT_BYTES = 64
# CUDA programming guide, "Function Parameters": 32,764 bytes of parameters since CUDA
# 12.1; the kernel's other one is a pointer.
MAX_DESCRIPTORS = (32_764 - 8) // DESCRIPTOR_BYTES

# Element types as encoded by the launcher's runtime function (observed in the modules
# that JAX's own GPU kernels compile to). A copy depends only on the width.
_FLOAT_CODES = {"float16": 5, "float32": 6, "bfloat16": 7}
_BITS_CODES = {1: 1, 2: 2, 4: 3, 8: 4}
# TMA reductions distinguish signed from unsigned: min and max differ.
_SIGNED_CODES = {"int32": 9, "int64": 10}
_SCALARS = ("buffer_index", "swizzle", "offset_elems", "devices")
_SWIZZLES = (16, 32, 64, 128)
# CUDA driver API: CUtensorMapDataType by bytes and of floats, CUtensorMapSwizzle by the
# span, and CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA.
_DRIVER_BITS = {1: 0, 2: 1, 4: 2, 8: 4}
_DRIVER_FLOATS = {"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
_DRIVER_SWIZZLES = {16: 0, 32: 1, 64: 2, 128: 3}
_DRIVER_NAN_FILL = 1


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """The contents of one TMA descriptor.

    Attributes:
      buffer_index: the index of the kernel's buffer that it describes.
      dtype: numpy's name of the element type.
      sizes: elements per dimension, outermost first, at most five.
      strides: in elements per dimension, outermost first; the last is 1.
      box: elements that one instruction copies per dimension, outermost first.
      swizzle: 16 (none), 32, 64 or 128.
      offset_elems: offset of the described array in the buffer, in elements.
      nan_fill: whether elements outside are read as NaN, not as zero.
      corners: of a map in im2col mode where the windows start in an image, and where
        they end from its end, outermost first; its box are windows and channels.
      owner: whose buffer: "" is the executing device's; "peers" makes a descriptor for
        that of each device, in the order of their ids; "all" is a multimem address.
      devices: number of devices, if there is an owner.
    """

    buffer_index: int
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 16
    offset_elems: int = 0
    nan_fill: bool = False
    corners: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    owner: Literal["", "peers", "all"] = ""
    devices: int = 1

    def __post_init__(self) -> None:
        rank = len(self.sizes)
        dimensions = rank if self.corners is None else 2
        if (
            not 1 <= rank <= 5
            or len(self.strides) != rank
            or len(self.box) != dimensions
        ):
            raise errors.InternalError(
                "A tensor map requires one size, stride and box entry per dimension",
                expected="1 to 5 dimensions (PTX ISA, Tensors)",
                got=f"sizes {self.sizes}, strides {self.strides}, box {self.box}",
            )
        if self.strides[-1] != 1:
            raise errors.InternalError(
                "The innermost dimension of a tensor map must be contiguous",
                expected="a last stride of 1",
                got=self.strides,
            )
        most, encoder = (256, ENCODE_FUNCTION)
        if self.corners is not None:
            most, encoder = (1024, IM2COL_FUNCTION)
        if max(self.box) > most or min(self.box) < 1:
            raise errors.InternalError(
                "A box dimension is out of range",
                expected=f"1 to {most} elements (CUDA driver API, {encoder})",
                got=self.box,
            )
        if self.swizzle not in _SWIZZLES:
            raise errors.InternalError(
                "Unknown swizzle", expected=_SWIZZLES, got=self.swizzle
            )
        if self.nan_fill and self.dtype not in _DRIVER_FLOATS:
            raise errors.InternalError(
                "These elements have no fill with NaN",
                expected=", ".join(_DRIVER_FLOATS),
                got=self.dtype,
            )

    @property
    def count(self) -> int:
        """The number of descriptors."""
        return self.devices if self.owner == "peers" else 1

    @property
    def own(self) -> TensorMap:
        """That of the executing device's buffer."""
        return dataclasses.replace(self, owner="", devices=1)

    @property
    def offset_bytes(self) -> int:
        """Offset of the described array in the buffer."""
        return self.offset_elems * np.dtype(self.dtype).itemsize

    @property
    def element_code(self) -> int:
        """The runtime function's code for the element type."""
        itemsize = np.dtype(self.dtype).itemsize
        named = {**_FLOAT_CODES, **_SIGNED_CODES}
        return named.get(self.dtype) or _BITS_CODES[itemsize]

    def to_attribute(self) -> ir.DictAttr:
        """The tag that represents this descriptor in the IR."""
        i64 = ir.IntegerType.get_signless(64)
        entries: dict[str, ir.Attribute] = {"dtype": ir.StringAttr.get(self.dtype)}
        entries["owner"] = ir.StringAttr.get(self.owner)
        for name in _SCALARS:
            entries[name] = ir.IntegerAttr.get(i64, getattr(self, name))
        for name in ("sizes", "strides", "box"):
            entries[name] = ir.DenseI64ArrayAttr.get(getattr(self, name))
        if self.nan_fill:
            entries["nan_fill"] = ir.UnitAttr.get()
        if self.corners is not None:
            entries["corners"] = ir.DenseI64ArrayAttr.get(sum(self.corners, ()))
        return ir.DictAttr.get(entries)

    @classmethod
    def from_attribute(cls, attribute: ir.Attribute) -> TensorMap:
        """The descriptor that a tag represents."""
        entries = ir.DictAttr(attribute)
        scalars = {name: ir.IntegerAttr(entries[name]).value for name in _SCALARS}
        tuples = {
            name: tuple(ir.DenseI64ArrayAttr(entries[name]))
            for name in ("sizes", "strides", "box")
        }
        dtype, owner = (ir.StringAttr(entries[x]).value for x in ("dtype", "owner"))
        nan, corners = "nan_fill" in entries, None
        if "corners" in entries:
            flat = tuple(ir.DenseI64ArrayAttr(entries["corners"]))
            corners = flat[: len(flat) // 2], flat[len(flat) // 2 :]
        return cls(
            dtype=dtype,
            owner=owner,
            nan_fill=nan,
            corners=corners,
            **scalars,  # type: ignore[arg-type]
            **tuples,  # type: ignore[arg-type]
        )


def owned_by(owner: peers.Owner | None) -> dict[str, Any]:
    """The fields of a tensor map for an owner of the buffer."""
    if owner is None:
        return {}
    devices = module.current().spec.devices
    return {"owner": "all" if owner == peers.ALL else "peers", "devices": devices}


def tensor_map_pointer(
    tensor_map: TensorMap, owner: peers.Owner | None = None
) -> ir.Value:
    """Emits the tagged operation that represents the descriptor's address.

    Args:
      owner: of the described buffer.

    Returns:
      `!llvm.ptr`, the operand of `cp.async.bulk.tensor`.
    """
    pointer = ir.Type.parse("!llvm.ptr")
    buffer = module.current().buffers[tensor_map.buffer_index]
    op = builtin.UnrealizedConversionCastOp([pointer], [buffer])
    op.operation.attributes[TAG] = tensor_map.to_attribute()
    address = op.results[0]
    if owner is None or owner == peers.ALL:
        return address
    if isinstance(owner, int):
        return _byte_offset(address, owner * DESCRIPTOR_BYTES)
    size = dtypes.constant(DESCRIPTOR_BYTES, np.dtype(np.int32))
    return operations.offset(address, arith.muli(owner, size))


def find_tensor_maps(buffers: Sequence[ir.Value]) -> list[ir.Operation]:
    """All tagged operations on the kernel's buffers, in program order."""
    # A walk over the whole body would create an object for each of its operations.
    owners = (use.owner.operation for buffer in buffers for use in buffer.uses)
    return program_order.in_order(op for op in owners if TAG in op.attributes)


def lower_tensor_maps(
    kernel: ir.Module,
    launch: ir.Operation,
    body: ir.Block,
    buffers: list[ir.Value],
    name: str,
) -> int:
    """Replaces the tagged operations of a launch by initialized descriptors.

    Args:
      kernel: receives the declaration of the runtime function.
      launch: the `gpu.launch`; the host code is inserted before it.
      body: the launch's block; the array's address is inserted at its start.
      buffers: the kernel's buffers, as host values: the operands of the tagged
        operations; behind them, in a kernel of several devices, those of `peers.py`.
      name: of the kernel, for messages.

    Returns:
      The number of descriptors that the host encodes.
    """
    tagged = find_tensor_maps(buffers)
    if not tagged:
        return 0
    slots: dict[TensorMap, list[ir.Operation]] = {}
    for op in tagged:
        slots.setdefault(TensorMap.from_attribute(op.attributes[TAG]), []).append(op)
    encoded = list(dict.fromkeys(tensor_map.own for tensor_map in slots))
    if len(encoded) > MAX_DESCRIPTORS:
        raise _too_many(len(encoded), name)
    with ir.InsertionPoint(launch):
        array = _emit_host(encoded, buffers)
    _declare(kernel, slots)
    pointer = ir.Type.parse("!llvm.ptr")
    with ir.InsertionPoint.at_block_begin(body):
        base = builtin.unrealized_conversion_cast([pointer], [array])
        addresses = {
            tensor_map: _byte_offset(base, i * DESCRIPTOR_BYTES)
            for i, tensor_map in enumerate(encoded)
        }
    prologue = program_order.first_of(launch, module.PROLOGUE)
    if owned := [(x, addresses[x.own]) for x in slots if x.owner]:
        made = descriptors.make(kernel, launch, prologue, buffers, owned)
        addresses |= {x: address for (x, _), address in zip(owned, made, strict=True)}
    for tensor_map, ops in slots.items():
        for op in ops:
            op.results[0].replace_all_uses_with(addresses[tensor_map])
            op.erase()
    if prologue is not None:
        _prefetch(prologue, [addresses[x] for x in slots if not x.owner])
    return len(encoded)


def _too_many(count: int, name: str) -> errors.OutOfResources:
    return errors.OutOfResources(
        f"kernel {name}: its copies have too many different tensor maps",
        resource="parameters",
        limit_bytes=MAX_DESCRIPTORS * DESCRIPTOR_BYTES,
        used_bytes=count * DESCRIPTOR_BYTES,
        expected=f"at most {MAX_DESCRIPTORS}: they are parameters of the kernel",
        got=count,
        hint="copy parts of fewer arrays and sizes by TMA, or by cp.async with "
        "implementation=plgpu.AsyncCopyImplementation.CP_ASYNC",
    )


def _prefetch(prologue: ir.Operation, addresses: Sequence[ir.Value]) -> None:
    """Fetches descriptors at the start of the kernel; a copy would wait for its own.

    PTX: `prefetch.tensormap`. Since: sm_90. The elected thread of each warpgroup issues
    it, predicated: a branch would cost more.
    """
    elected = prologue.operands[module.PROLOGUE_ELECTED]
    with ir.InsertionPoint(prologue):
        for address in addresses:
            llvm.inline_asm(
                None,
                [elected, address],
                "@$0 prefetch.tensormap [$1];",
                "b,l",
                has_side_effects=True,
            )


def _emit_host(tensor_maps: list[TensorMap], buffers: list[ir.Value]) -> ir.Value:
    pointer = ir.Type.parse("!llvm.ptr")
    size_bytes = len(tensor_maps) * DESCRIPTOR_BYTES
    array_type = ir.Type.parse(f"!llvm.array<{size_bytes} x i8>")
    host = llvm.alloca(
        pointer, _i64(1), array_type, alignment=DESCRIPTOR_ALIGNMENT_BYTES
    )
    for slot, tensor_map in enumerate(tensor_maps):
        base = _byte_offset(buffers[tensor_map.buffer_index], tensor_map.offset_bytes)
        place = _byte_offset(host, slot * DESCRIPTOR_BYTES)
        if tensor_map.corners is not None:
            _encode_im2col(tensor_map, place, base)
            continue
        func.call(
            [],
            INIT_FUNCTION,
            [
                place,
                base,
                _i64(tensor_map.element_code),
                _i64(len(tensor_map.sizes)),
                _host_array(tensor_map.sizes),
                _host_array(tensor_map.strides),
                _i64(tensor_map.swizzle),
                _host_array(tensor_map.box),
            ],
        )
        if tensor_map.nan_fill:
            _encode_nan_fill(tensor_map, place, base)
    return llvm.load(array_type, host)


def _encode_nan_fill(tensor_map: TensorMap, place: ir.Value, base: ir.Value) -> None:
    """Emits host code that encodes a descriptor once more, with a fill with NaN.

    The runtime function has accepted all other arguments, or has ended the process with
    a message; should the driver refuse this one, the process ends, too.
    """
    box = _host_array(tensor_map.box[::-1], bits=32)
    _encode(ENCODE_FUNCTION, tensor_map, place, base, [box])


def _encode_im2col(tensor_map: TensorMap, place: ir.Value, base: ir.Value) -> None:
    """Emits host code that encodes a descriptor in im2col mode."""
    assert tensor_map.corners is not None
    corners = [_host_array(x[::-1], bits=32) for x in tensor_map.corners]
    windows, channels = tensor_map.box
    box = [*corners, _i32(channels), _i32(windows)]
    _encode(IM2COL_FUNCTION, tensor_map, place, base, box)


def _encode(
    function: str,
    tensor_map: TensorMap,
    place: ir.Value,
    base: ir.Value,
    box: Sequence[ir.Value],
) -> None:
    """Emits a call of the driver, and a trap where it refuses."""
    rank = len(tensor_map.sizes)
    itemsize = np.dtype(tensor_map.dtype).itemsize
    # The driver takes the innermost dimension first, and no stride for it.
    strides = tuple(n * itemsize for n in tensor_map.strides[-2::-1])
    element = _DRIVER_FLOATS.get(tensor_map.dtype, _DRIVER_BITS.get(itemsize))
    assert element is not None
    result = func.call(
        [ir.IntegerType.get_signless(32)],
        function,
        [
            place,
            _i32(element),
            _i32(rank),
            base,
            _host_array(tensor_map.sizes[::-1]),
            _host_array(strides),
            *box,
            _host_array((1,) * rank, bits=32),
            _i32(0),  # CU_TENSOR_MAP_INTERLEAVE_NONE
            _i32(_DRIVER_SWIZZLES[tensor_map.swizzle]),
            _i32(0),  # CU_TENSOR_MAP_L2_PROMOTION_NONE, as the runtime function
            _i32(_DRIVER_NAN_FILL if tensor_map.nan_fill else 0),
        ],
    )
    refused = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ne, result, _i32(0)))
    with ir.InsertionPoint(refused.then_block):
        llvm.intr_trap()
        scf.yield_([])


def _declare(kernel: ir.Module, tensor_maps: Collection[TensorMap]) -> None:
    pointer = ir.Type.parse("!llvm.ptr")
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    arguments = [pointer, pointer, i64, i64, pointer, pointer, i64, pointer]
    start, end = [pointer, i32, i32, *[pointer] * 3], [pointer, *[i32] * 4]
    functions = {
        INIT_FUNCTION: (arguments, []),
        ENCODE_FUNCTION: ([*start, pointer, *end], [i32]),
        IM2COL_FUNCTION: ([*start, pointer, pointer, i32, i32, *end], [i32]),
    }
    if not any(x.nan_fill for x in tensor_maps):
        del functions[ENCODE_FUNCTION]
    if not any(x.corners for x in tensor_maps):
        del functions[IM2COL_FUNCTION]
    with ir.InsertionPoint.at_block_begin(kernel.body):
        for name, kind in functions.items():
            func.FuncOp(name, kind, visibility="private")


def _i32(value: int) -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _i64(value: int) -> ir.Value:
    return operations.constant(ir.IntegerType.get_signless(64), value)


def _byte_offset(pointer: ir.Value, offset_bytes: int) -> ir.Value:
    if offset_bytes == 0:
        return pointer
    return operations.offset(pointer, offset_bytes)


def _host_array(values: tuple[int, ...], bits: int = 64) -> ir.Value:
    pointer = ir.Type.parse("!llvm.ptr")
    element = ir.IntegerType.get_signless(bits)
    array = llvm.alloca(pointer, _i64(max(len(values), 1)), element)
    for index, value in enumerate(values):
        place = _byte_offset(array, bits // 8 * index)
        llvm.store(operations.constant(element, value), place)
    return array
