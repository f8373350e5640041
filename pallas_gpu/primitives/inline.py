# SPDX-License-Identifier: Apache-2.0
"""Inline code: an operation whose instructions are emitted by a function of the author.

The function runs where the operation is lowered, with handles of MLIR values in place
of references and arrays. `pallas_gpu.mosaic` stands above the lowering; it registers
how it makes these handles (`handles_by`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_gpu import _jax, errors, expect, types
from pallas_gpu.layouts import Layout, RegisterLayout
from pallas_gpu.layouts.registers.placement import place
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import registers
from pallas_gpu.types import transforms, values

__all__ = ["inline_mgpu", "RefType", "ShapeDtypeStruct"]

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


@expect.arguments()
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
    It returns `FragmentedArray`s. docs/inline.md shows each of them.

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

    Example:
      >>> @plgpu.inline_mgpu(
      ...     arg_types=(plgpu.RefType(),),
      ...     return_type=plgpu.ShapeDtypeStruct((64, 128), jnp.float32, strided),
      ... )
      ... def twice(ctx, x_ref):
      ...     x = mgpu.FragmentedArray.load_strided(x_ref)
      ...     return x + x
    """
    given, given_tree = jax.tree.flatten(tuple(arg_types))
    made, made_tree = jax.tree.flatten(return_type)
    who = "inline_mgpu"
    for x in given:
        types.refuse_foreign(x, f"{who}: arg_types")
        if not isinstance(x, RefType):
            _layout(x, f"{who}: arg_types")
    for i, x in enumerate(made):
        types.refuse_foreign(x, f"{who}: return_type")
        expect.instance(ShapeDtypeStruct, written="plgpu.ShapeDtypeStruct(...)")(
            x, f"{who}: return_type"
        )
        _require_fit(x.layout, x.shape, f"{who}: result {i}")

    def decorate(emit: Callable[..., Any]) -> Callable[..., Any]:
        code = Code(emit, tuple(given), given_tree, tuple(made), made_tree, emulate)

        def call(*args: Any) -> Any:
            try:
                return _called(code, args)
            except errors.PallasGpuError as error:
                raise error.with_location(_jax.where_now()) from None

        return call

    return decorate


def _called(code: Code, args: tuple[Any, ...]) -> Any:
    leaves, tree = jax.tree.flatten(args)
    if tree != code.given_tree:
        raise errors.ArgumentError(
            f"{code.name}: the arguments do not match arg_types",
            expected=f"{code.given_tree.num_leaves} in the tree {code.given_tree}",
            got=f"{tree.num_leaves} in the tree {tree}",
            hint="arg_types has a type for each argument, in the same pytree",
        )
    operands = [
        _operand(x, t, f"{code.name}: argument {i}")
        for i, (x, t) in enumerate(zip(leaves, code.given, strict=True))
    ]
    return jax.tree.unflatten(code.made_tree, code(operands))


def _operand(x: Any, given: Given, what: str) -> Any:
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
