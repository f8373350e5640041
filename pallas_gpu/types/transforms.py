# SPDX-License-Identifier: Apache-2.0
"""How an SMEM array is stored: tilings and swizzles as part of its type."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from pallas_gpu import errors, expect
from pallas_gpu.layouts import SmemLayout
from pallas_gpu.types.completion import shows
from pallas_gpu.types.elements import stored_bits
from pallas_gpu.types.values import element_type


@runtime_checkable
class Transform(Protocol):
    """A step from the logical shape of an SMEM array to its stored form."""

    def describe(self) -> str:
        """Returns a short description for error messages."""


def transforms(value: Any, what: str) -> tuple[Transform, ...]:
    """Accepts sequences of transforms."""
    if expect.is_sequence(value):
        for transform in value:
            if not isinstance(transform, Transform) or isinstance(transform, type):
                raise _unknown_transform(transform)
        return tuple(value)
    raise expect.wrong_type(
        what,
        "a sequence of transforms",
        "a tuple of TilingTransform and SwizzleTransform",
        value,
        "write transforms=(plgpu.TilingTransform(...), plgpu.SwizzleTransform(...))",
    )


@expect.arguments()
@shows()
@dataclasses.dataclass(frozen=True)
class TilingTransform:
    """Stores the trailing dimensions tile by tile.

    A logical `(M, N)` array with tiling `(8, 64)` is stored as `(M/8, N/64, 8, 64)`,
    row-major. TMA and the tensor cores read such tiles as one unit.

    Attributes:
      tiling: sizes of one tile, in elements; it covers the trailing dimensions.

    Raises:
      ArgumentError: the tiling is empty or not positive.
    """

    tiling: tuple[int, ...]

    def __post_init__(self):
        if not self.tiling or min(self.tiling) < 1:
            raise errors.ArgumentError(
                "TilingTransform: a tiling needs positive sizes",
                expected="one positive integer for each tiled trailing dimension",
                got=self.tiling,
                hint="for 16-bit elements and a 128-byte swizzle use (8, 64)",
            )

    def describe(self) -> str:
        return f"tiling {self.tiling}"


@expect.arguments()
@shows()
@dataclasses.dataclass(frozen=True)
class SwizzleTransform:
    """Permutes 16-byte chunks so that the rows of a column lie in different banks.

    PTX: tensor copies, "Swizzling modes".

    Attributes:
      swizzle: width of the pattern in bytes: 16 (none), 32, 64 or 128. The minor tile
        dimension has to be exactly that wide.

    Raises:
      ArgumentError: another width.
    """

    swizzle: int

    def __post_init__(self):
        if self.swizzle not in (16, 32, 64, 128):
            raise errors.ArgumentError(
                "SwizzleTransform: the hardware does not support this swizzle",
                expected="16 (none), 32, 64 or 128 bytes",
                got=self.swizzle,
                hint="use find_swizzle(minor_dim_bits) to choose one",
            )

    def describe(self) -> str:
        return f"{self.swizzle}-byte swizzle"


@expect.arguments(
    minor_dim_bits=expect.integer(
        1, unit="bits", hint="it is the minor dimension times the bits of an element"
    )
)
def find_swizzle(minor_dim_bits: int, what: str = "") -> int:
    """Returns the widest swizzle whose pattern divides the minor dimension.

    Args:
      minor_dim_bits: size of the minor dimension in bits.
      what: name of the operand, for error messages.

    Raises:
      ArgumentError: the minor dimension is not a positive multiple of 16 bytes.
    """
    for swizzle_bytes in (128, 64, 32, 16):
        if minor_dim_bits % (swizzle_bytes * 8) == 0:
            return swizzle_bytes
    raise errors.ArgumentError(
        f"find_swizzle: no swizzle fits{f' {what}' if what else ''}",
        expected="a minor dimension that is a multiple of 128 bits",
        got=f"{minor_dim_bits} bits",
        hint="pad the minor dimension",
    )


def itemsize_bits(dtype) -> int:
    """Returns the stored size of one element in bits; a bool takes a byte."""
    return stored_bits(element_type(dtype, "an array"))


def smem_layout(
    shape: Sequence[int], dtype, transforms: Sequence[Transform]
) -> SmemLayout:
    """Returns the placement of an array in SMEM, with its transforms checked.

    Args:
      shape: logical shape.
      dtype: element type.
      transforms: at most one TilingTransform and one SwizzleTransform.

    Raises:
      LayoutError: the transforms do not fit the shape or each other.
    """
    tiling: tuple[int, ...] | None = None
    swizzle = 16
    for transform in transforms:
        match transform:
            case TilingTransform() if tiling is None:
                tiling = transform.tiling
            case SwizzleTransform():
                swizzle = transform.swizzle
            case TilingTransform():
                raise errors.UnsupportedError(
                    "an SMEM array has two tilings",
                    expected="one TilingTransform",
                    got=[t.describe() for t in transforms],
                    hint="pass one TilingTransform",
                )
            case _:
                raise _unknown_transform(transform)
    bits = itemsize_bits(dtype)
    if tiling is not None:
        _check_tiling(tuple(shape), tiling)
    if swizzle > 16:
        _check_swizzle(tuple(shape), bits, tiling, swizzle)
    return SmemLayout.of(tuple(shape), bits, tiling, swizzle)


def _unknown_transform(transform: Any) -> errors.ArgumentTypeError:
    return errors.ArgumentTypeError(
        "unknown SMEM transform",
        expected="TilingTransform or SwizzleTransform",
        got=expect.shown(transform),
        hint="remove it",
    )


def _check_tiling(shape: tuple[int, ...], tiling: tuple[int, ...]) -> None:
    if len(tiling) > len(shape):
        raise errors.LayoutError(
            "the tiling has more dimensions than the array",
            expected=f"at most {len(shape)} dimensions for shape {shape}",
            got=f"tiling {tiling}",
            hint="drop leading sizes of the tiling",
        )
    tiled = shape[len(shape) - len(tiling) :]
    bad = [d for d, (n, t) in enumerate(zip(tiled, tiling, strict=True)) if n % t]
    if bad:
        raise errors.LayoutError(
            "the tiling does not divide the array",
            expected=f"trailing dimensions {tiled} to be multiples of {tiling}",
            got=", ".join(
                f"{tiled[d]} % {tiling[d]} = {tiled[d] % tiling[d]}" for d in bad
            ),
            hint="choose a tile that divides the shape, or pad the shape",
        )


def _check_swizzle(shape, bits, tiling, swizzle) -> None:
    minor = tiling[-1] if tiling else (shape[-1] if shape else 1)
    if minor * bits != swizzle * 8:
        raise errors.LayoutError(
            "the swizzle does not fit the tile",
            expected=f"a minor tile dimension of {swizzle} bytes "
            f"({swizzle * 8 // bits} elements of {bits} bits)",
            got=f"{minor} elements, {minor * bits / 8:g} bytes "
            f"(shape {shape}, tiling {tiling})",
            hint=f"use TilingTransform((8, {swizzle * 8 // bits})), or "
            f"SwizzleTransform(find_swizzle({minor * bits}))",
        )
