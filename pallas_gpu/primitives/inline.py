# SPDX-License-Identifier: Apache-2.0
"""Inline code: an operation whose instructions are emitted by a function of the author.

The function runs where the operation is lowered, with handles of MLIR values in place
of references and arrays. `pallas_gpu.mosaic` stands above the lowering; it registers
how it makes these handles (`handles_by`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types as python_types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_gpu import _jax, arch, errors, expect, types
from pallas_gpu.layouts import Layout, RegisterLayout
from pallas_gpu.layouts.registers.placement import place
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import registers
from pallas_gpu.types import transforms, values

__all__ = ["inline_mgpu", "inline_ptx", "RefType", "ShapeDtypeStruct"]

# Each operand is a dictionary of its own. Nobody knows what the code does to memory: it
# may read and write, by threads and by copies, and signal to others.
inline_mgpu_p = registry.define(
    "inline_mgpu",
    "inline",
    results=lambda *_, code, **__: [
        _jax.ShapedArray(made.shape, made.dtype) for made in code.made
    ],
    reads=("operand",),
    writes=("operand",),
    remote=("operand",),
    multicast=("operand",),
    proxies=("generic", "async"),
    releases=True,
    opaque=True,
)


@expect.arguments(transforms=transforms.transforms)
@dataclasses.dataclass(frozen=True)
class RefType:
    """The type of a reference that inline code is given.

    Attributes:
      transforms: tiling and swizzle of an array in SMEM. The code is given a memref of
        the tiled shape.

    Raises:
      ArgumentTypeError: not transforms.
    """

    transforms: tuple[types.Transform, ...] = ()


def _layout(value: Any, what: str) -> Any:
    found = registers.check_layout(value, what)
    if found is None:
        raise expect.wrong_type(
            what, "a register layout", "a member of plgpu.Layout, or a TiledLayout",
            value, "a scalar has the layout plgpu.Layout.WG_SPLAT",
        )  # fmt: skip
    return found


@expect.arguments(shape=expect.integers(1), layout=_layout)
@dataclasses.dataclass(frozen=True)
class ShapeDtypeStruct:
    """The type of an array that inline code returns.

    Attributes:
      shape: its shape, `()` for a scalar.
      dtype: its element type.
      layout: its layout in registers; of a scalar `Layout.WG_SPLAT`.

    Raises:
      ArgumentTypeError: not a shape, an element type or a layout.
    """

    shape: tuple[int, ...]
    dtype: values.ElementType
    layout: Layout | RegisterLayout


Given = RefType | Layout | RegisterLayout


@dataclasses.dataclass(frozen=True)
class Code:
    """Inline code, with the types of what it is given and of what it makes.

    Attributes:
      emit: emits it: `emit(context, *operands)` returns what it makes.
      given: the types of the operands, the leaves of `given_tree`.
      made: the types of the results, the leaves of `made_tree`.
      emulate: computes the same in NumPy.
      synchronized: whether the warps of the warpgroup meet before and after it, as
        around stores.
    """

    emit: Callable[..., Any]
    given: tuple[Given, ...]
    given_tree: Any
    made: tuple[ShapeDtypeStruct, ...]
    made_tree: Any
    emulate: Callable[..., Any] | None = None
    synchronized: bool = True

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"inline_mgpu ({getattr(self.emit, '__name__', 'a function')})"

    def transforms(self, i: int) -> tuple[types.Transform, ...]:
        """Returns the transforms of a reference, the i-th operand."""
        given = self.given[i]
        assert isinstance(given, RefType)
        return given.transforms

    def captured(self) -> list[str]:
        """Returns the names of arrays and references that the function captures."""
        emit = inspect.unwrap(self.emit)
        names = getattr(getattr(emit, "__code__", None), "co_freevars", ())
        cells = zip(names, getattr(emit, "__closure__", None) or (), strict=True)
        return [name for name, cell in cells if _jax.is_tracer(_contents(cell))]

    def leaves(self, returned: Any, by: str, **options: Any) -> list[Any]:
        """Returns the results in their order.

        Args:
          returned: a pytree of them.
          by: who returns it.
          options: of `jax.tree.flatten`.

        Raises:
          ArgumentError: it is not the pytree that is declared.
        """
        leaves, tree = jax.tree.flatten(returned, **options)
        if tree == self.made_tree:
            return leaves
        raise errors.ArgumentError(
            f"{self.name}: the results of {by} do not match return_type",
            expected=f"{self.made_tree.num_leaves} in the tree {self.made_tree}",
            got=f"{tree.num_leaves} in the tree {tree}",
            hint="return an array for each ShapeDtypeStruct, in the same pytree",
        )

    def __call__(self, operands: Sequence[Any]) -> list[Any]:
        """Makes it an operation of the kernel; returns the results."""
        split = [
            ops.operand(x) if isinstance(t, RefType) else x
            for x, t in zip(operands, self.given, strict=True)
        ]
        named = [{"operand": x} for x in split]
        return ops.bind(inline_mgpu_p, named, code=self)


_HANDLES: list[Callable[[], Any]] = []


def handles_by(make: Callable[[], Any]) -> None:
    """Registers what makes the handles that inline code is given."""
    _HANDLES[:] = [make]


def handles() -> Any:
    """Returns what makes the handles; see `mosaic/inlined.py`."""
    return _HANDLES[0]()


# --- inline_mgpu ----------------------------------------------------------------------


def _types(value: Any, what: str) -> tuple[Any, ...]:
    """Accepts sequences of pytrees of types."""
    if not expect.is_sequence(value):
        raise expect.wrong_type(
            what, "a sequence", "a type for each argument", value,
            "write arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA)",
        )  # fmt: skip
    for x in jax.tree.leaves(tuple(value)):
        types.refuse_foreign(x, what)
        if not isinstance(x, RefType):
            _layout(x, what)
    return tuple(value)


def _made_types(value: Any, what: str) -> Any:
    """Accepts pytrees of types of results."""
    rule = expect.instance(ShapeDtypeStruct, written="plgpu.ShapeDtypeStruct(...)")
    for i, x in enumerate(jax.tree.leaves(value)):
        types.refuse_foreign(x, what)
        _require_fit(rule(x, what).layout, x.shape, f"{what}: result {i}")
    return value


@expect.arguments(arg_types=_types, return_type=_made_types)
def inline_mgpu(
    *,
    arg_types: Any = (),
    return_type: Any = None,
    emulate: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that makes a function which emits code an operation.

    PTX: what the function emits. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp, with scalars and references
    alone. What it completes is up to the code. The warps of a warpgroup meet before and
    after code that is given references, as they do around stores.

    The function is called when the kernel is lowered, possibly several times, with a
    `mosaic.LaunchContext` and a handle for each argument: of a reference a memref, of a
    barrier a `mosaic.BarrierRef`, of an array or a scalar a `mosaic.FragmentedArray`.
    It returns `FragmentedArray`s. Scalars of the kernel that it captures are handles,
    too. docs/inline.md shows each of them.

    Args:
      arg_types: for each argument a pytree: `RefType` for a reference, a register
        layout for an array, `Layout.WG_SPLAT` for a scalar.
      return_type: a pytree of `ShapeDtypeStruct`s; None for no results.
      emulate: computes the results in NumPy, for the emulator, from the same arguments
        without the context: arrays, and references that are read and written by
        indices. Without it a kernel with inline code runs on the CPU as the code that
        it is lowered to, as with `interpret="emitted"`.

    Returns:
      A decorator. The decorated function takes references and arrays.

    Raises:
      ArgumentTypeError: a type is of another kind, or does not fit its argument.
      ArgumentError: the arguments are another pytree than their types.
      LayoutError: a layout does not fit its array, or `RefType.transforms` are not
        those of the reference.
      MemorySpaceError: an accumulator; a barrier or TMEM, with `emulate`.

    Example:
      >>> @plgpu.inline_mgpu(
      ...     arg_types=(plgpu.RefType(),),
      ...     return_type=plgpu.ShapeDtypeStruct((64, 128), jnp.float32, strided),
      ... )
      ... def twice(ctx, x_ref):
      ...     x = mgpu.FragmentedArray.load_strided(x_ref)
      ...     return x + x
    """
    given, given_tree = jax.tree.flatten(arg_types)
    made, made_tree = jax.tree.flatten(return_type)

    def decorate(emit: Callable[..., Any]) -> Callable[..., Any]:
        code = Code(emit, tuple(given), given_tree, tuple(made), made_tree, emulate)

        def call(*args: Any) -> Any:
            with errors.at(_jax.where_now):
                return _called(code, args)

        return call

    return decorate


def _with_captured(code: Code) -> tuple[Code, list[Any]]:
    """Makes the scalars that the function captures an argument more.

    It runs when the kernel is lowered, and then has handles of them, too.
    """
    emit, emulate = code.emit, code.emulate
    cells = list(getattr(emit, "__closure__", None) or ())
    traced = [i for i, cell in enumerate(cells) if _is_scalar(cell)]
    if not traced:
        return code, []
    captured = [cells[i].cell_contents for i in traced]
    given = [Layout.WG_SPLAT] * len(captured)

    def emit_with(context: Any, *args: Any) -> Any:
        own = list(cells)
        for i, handle in zip(traced, args[-1], strict=True):
            own[i] = python_types.CellType(handle)
        function = python_types.FunctionType(
            emit.__code__, emit.__globals__, emit.__name__, emit.__defaults__,
            tuple(own),
        )  # fmt: skip
        function.__kwdefaults__ = emit.__kwdefaults__
        return function(context, *args[:-1])

    functools.update_wrapper(emit_with, emit)
    declared = jax.tree.unflatten(code.given_tree, code.given)
    flat, tree = jax.tree.flatten((*declared, given))
    rest = None if emulate is None else lambda *args: emulate(*args[:-1])
    whole = dataclasses.replace(
        code, emit=emit_with, given=tuple(flat), given_tree=tree, emulate=rest
    )
    return whole, captured


def _is_scalar(cell: Any) -> bool:
    """Whether a variable is a scalar of the kernel.

    The shapes of arrays and references may be all that is used of them; the code gets
    them as arguments.
    """
    value = _contents(cell)
    return _jax.is_tracer(value) and types.base_aval(value) is None and not value.shape


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later
        return None


def _called(code: Code, args: tuple[Any, ...]) -> Any:
    leaves, tree = jax.tree.flatten(args)
    if tree != code.given_tree:
        raise errors.ArgumentError(
            f"{code.name}: the arguments do not match arg_types",
            expected=f"{code.given_tree.num_leaves} in the tree {code.given_tree}",
            got=f"{tree.num_leaves} in the tree {tree}",
            hint="arg_types has a type for each argument, in the same pytree",
        )
    first = "the context comes first: def f(ctx, x):"
    expect.takes(code.emit, f"{code.name}: the function", (None, *args), first)
    if code.emulate is not None:
        expect.takes(code.emulate, f"{code.name}: `emulate`", args, "it has no context")
    code, captured = _with_captured(code)
    operands = [
        _operand(x, t, code.emulate is not None, f"{code.name}: argument {i}")
        for i, (x, t) in enumerate(zip([*leaves, *captured], code.given, strict=True))
    ]
    return jax.tree.unflatten(code.made_tree, code(operands))


def _operand(x: Any, given: Given, emulated: bool, what: str) -> Any:
    """Returns an argument that fits its type."""
    aval = types.base_aval(x)
    if isinstance(given, RefType):
        if aval is None:
            raise errors.ArgumentTypeError(
                f"{what} is not a reference",
                expected="a reference: its type is a RefType",
                got=expect.shown(x),
                hint="declare an array by its layout",
            )
        _require_handle(aval, emulated, what)
        _require_transforms(aval, given, what)
        return x
    if aval is not None:
        raise errors.ArgumentTypeError(
            f"{what} is a reference",
            expected="an array: its type is a layout",
            got=types.describe(x),
            hint="read it, ref[...], or declare it as a plgpu.RefType()",
        )
    x = values.array(x, what)
    _require_fit(given, x.shape, what)
    return x


def _require_handle(aval: Any, emulated: bool, what: str) -> None:
    """Raises MemorySpaceError for what code, or its `emulate`, cannot be given."""
    accumulates = isinstance(aval, types.AccumulatorRef)
    if accumulates or (emulated and aval.memory_space not in (types.SMEM, types.GMEM)):
        raise errors.MemorySpaceError(
            f"{what} is in the wrong memory space",
            expected="references in SMEM and GMEM"
            + (" for code with `emulate`" * emulated or ", TMEM, and barriers"),
            got=types.describe(aval),
            hint="pass its value, acc[...], or accumulate in the code: "
            "mosaic.WGMMAAccumulator"
            if accumulates
            else "omit emulate: the kernel then runs on a CPU as emitted code",
        )


def _require_fit(layout: Any, shape: tuple[int, ...], what: str) -> None:
    """Raises LayoutError unless an array can have the layout; a scalar has none."""
    try:
        if shape:
            place(layout, shape)
    except errors.LayoutError as error:
        raise errors.LayoutError(
            f"{what} does not fit the layout that is declared: {error.what}",
            expected=error.expected,
            got=error.got,
            hint="declare a layout of the shape of the array",
        ) from None


def _require_transforms(aval: Any, given: RefType, what: str) -> None:
    """Raises LayoutError unless the array is, or may be, stored as declared."""
    in_smem = aval.memory_space is types.SMEM
    own = aval.transforms if in_smem else ()
    fits = not given.transforms
    if in_smem:
        declared = types.smem_layout(aval.shape, aval.dtype, given.transforms)
        fits = not own or declared == types.smem_layout(aval.shape, aval.dtype, own)
    if not fits:
        raise errors.LayoutError(
            f"{what} is stored in another way than declared",
            expected=_shown(given.transforms),
            got=f"{types.describe(aval)}, {_shown(own)}",
            hint="give RefType the transforms of the reference",
        )


def _shown(found: Sequence[types.Transform]) -> str:
    return f"transforms=({', '.join(x.describe() for x in found)})"


def require_stored(op: Any) -> None:
    """Raises LayoutError for an array in SMEM that is row-major and declared as tiled.

    Where layouts are inferred it is then stored as declared.
    """
    for i, named in enumerate(op.operands):
        x = named["operand"]
        if getattr(x, "space", None) is not types.SMEM or x.buffer.aval.transforms:
            continue
        if declared := op.params["code"].transforms(i):
            raise errors.LayoutError(
                f"{op.params['code'].name}: argument {i} is stored in another way than "
                "declared",
                expected=_shown(declared),
                got=f"{types.describe(x.buffer.aval)}, row-major",
                hint="give the transforms to the declaration of the array, too: "
                "plgpu.SMEM(shape, dtype, transforms=...)",
            )


# --- inline PTX -----------------------------------------------------------------------

inline_ptx_p = registry.define(
    "inline_ptx",
    "inline",
    results=lambda *_, shape, dtypes, **__: [
        _jax.ShapedArray(shape, dtype) for dtype in dtypes
    ],
)
# Registers that the text names: `$0`, or `${0}`; `$$` is a dollar sign.
_REGISTER = re.compile(r"(?<!\$)(?:\$\$)*\$\{?(\d+)")


def _result_types(value: Any, what: str) -> Any:
    if value is None:
        return None
    if expect.is_sequence(value):
        return tuple(values.element_type(x, what) for x in value)
    return values.element_type(value, what)


# A template names each register: a larger number is a mistake.
_MOST_PACKED = 32


@expect.arguments(
    operands=values.array,
    dtype=_result_types,
    pack=expect.integer(1, _MOST_PACKED, unit="elements"),
)
def inline_ptx(
    template: str,
    *operands: Any,
    dtype: Any = None,
    pack: int = 1,
    pure: bool = True,
    since: str | None = None,
    emulate: Callable[..., Any] | None = None,
) -> Any:
    """Executes PTX for scalars, or for each element of arrays in registers.

    PTX: the template. Since: sm_90, or `since`.

    Issued by a warpgroup, or inside `warp_map` by a warp; each thread executes it for
    its elements. A scalar is in a register of each thread: a result that is a scalar
    must be equal in all of them.

    Args:
      template: statements of PTX. `$0`, `$1` … are registers, those of the results
        first, then those of the operands; `$$` is a dollar sign. Elements of 16, 32 and
        64 bits are in registers of that width, one of 8 bits in the lower half of one
        of 16 bits.
      *operands: scalars, and arrays whose shapes broadcast to one.
      dtype: the element type of the result; a sequence of them for several results;
        None for none. They have the shape of the operands.
      pack: how many elements the template takes at once, 1 to 32. Those of fewer than
        32 bits share registers, the first one in the lowest bits: two of 16 bits and
        four of 8 bits are one register, four of 16 bits are two.
      pure: whether it only computes its results: it may be moved, and dropped if they
        are not used. Without results it is always executed.
      since: the first target that has the instruction, e.g. `"sm_100a"`.
      emulate: computes the results in NumPy, for the emulator, from the operands.
        Without it the kernel runs on the CPU as the code that it is lowered to, which
        raises an error for an instruction that is not modelled.

    Returns:
      The result, or a tuple of them if `dtype` is a sequence; None without any.

    Raises:
      ArgumentError: the template names other registers than there are.
      DTypeError: bools, or elements of 2 or 4 bits.
      ShapeError: the shapes do not broadcast, or scalars with `pack`.
      TargetError: the kernel is for a target before `since`.

    Example:
      >>> y = plgpu.inline_ptx("ex2.approx.ftz.f32 $0, $1;", x, dtype=jnp.float32)
    """
    several = isinstance(dtype, tuple)
    made = () if dtype is None else dtype if several else (dtype,)
    shape = _common_shape([x.shape for x in operands])
    if pack > 1 and not shape:
        raise errors.ShapeError(
            "inline_ptx: scalars are not packed",
            expected="pack=1, or an operand that is an array",
            got=f"pack={pack}, and {len(operands)} scalars",
            hint="omit pack",
        )
    types_ = [*made, *(x.dtype for x in operands)]
    _require_registers(template, sum(_count(x, pack) for x in types_))
    if since is not None:
        arch.target(since)  # raises TargetError for an unknown one
    results = inline_ptx_p.bind(
        *operands,
        template=template,
        shape=shape,
        dtypes=tuple(made),
        pack=pack,
        pure=pure and bool(made),
        since=since,
        emulate=emulate,
    )
    if not made:
        return None
    return tuple(results) if several else results[0]


def _common_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise errors.ShapeError(
            "inline_ptx: the shapes of the operands do not broadcast to one",
            expected="scalars, and arrays of one shape",
            got=" and ".join(map(str, shapes)),
            hint="reshape or broadcast the operands",
        ) from None


def _count(dtype: Any, pack: int) -> int:
    """Returns how many registers a group of elements has."""
    bits = types.itemsize_bits(dtype)
    if bits < 8 or dtype == np.bool_:
        raise errors.DTypeError(
            "inline_ptx: the elements are not those of a register",
            expected="integers and floats of 8, 16, 32 or 64 bits",
            got=np.dtype(dtype).name,
            hint="convert bools and narrow integers with .astype(jnp.int32)",
        )
    if bits >= 32:
        return pack
    if pack * bits > 16 and pack * bits % 32:
        raise errors.ArgumentError(
            "inline_ptx: the packed elements do not fill registers",
            expected=f"pack={32 // bits} elements of {bits} bits, or a multiple of it",
            got=f"pack={pack}",
            hint="a register has 32 bits",
        )
    return max(pack * bits // 32, 1)


def _require_registers(template: str, count: int) -> None:
    named = {int(x) for x in _REGISTER.findall(template)}
    if named != set(range(count)):
        raise errors.ArgumentError(
            "inline_ptx: the template does not name the registers that there are",
            expected=f"each of $0 to ${count - 1}" if count else "no register",
            got=", ".join(f"${x}" for x in sorted(named)) or "no register",
            hint="the results that dtype declares come first, then operands; elements "
            "share registers with `pack`",
        )
