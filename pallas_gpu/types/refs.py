# SPDX-License-Identifier: Apache-2.0
"""Abstract references: what kernels handle while they are traced.

An SMEM reference has the logical shape that the author wrote; how it is stored is part
of its type (`storage`). JAX refuses one abstract reference object for two arguments, so
declarations make a fresh one each time.

Arrays and barriers have our own indexing: JAX's checks less, and its errors lack the
kernel's line.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors, expect
from pallas_gpu.types import values
from pallas_gpu.types.completion import shows
from pallas_gpu.types.indexing import steps as index_steps
from pallas_gpu.types.spaces.resource import ROW_MAJOR, Resource, Storage
from pallas_gpu.types.steps import is_window, typed
from pallas_gpu.types.transforms import itemsize_bits

# A tracer looks its attributes up in its abstract value; these two kinds of attributes
# receive the tracer as their argument.
aval_property = type(vars(_jax.AbstractRef)["at"])
aval_method = type(vars(_jax.AbstractRef)["get"])


@shows(
    "at", "T", "transpose", "reshape", "bitcast", "get", "set", "swap", "shape",
    "dtype", "ndim", "size", fields=False,
)  # fmt: skip
class RefView(_jax.TransformedRef):
    """A part of a reference: what `ref.at[...]` and `ref.T` return."""

    @functools.cached_property
    def _type(self) -> tuple[tuple[int, ...], Any]:
        aval = base_aval(self)
        return typed(self.transforms, tuple(aval.shape), aval.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._type[0]

    @property
    def dtype(self) -> Any:
        return self._type[1]

    @property
    def is_window(self) -> bool:
        """Whether all steps are integers, slices of stride 1 and transposes."""
        return all(map(is_window, self.transforms))

    @property
    def at(self) -> _At:
        return _At(self)

    @property
    def T(self) -> RefView:  # noqa: N802 - numpy's name
        return self.transpose()

    def transpose(self, *permutation: Any) -> RefView:
        """Returns a view with its dimensions permuted, as numpy does."""
        order = _permutation(permutation, len(self.shape))
        return RefView(self.ref, (*self.transforms, _jax.TransposeTransform(order)))

    def get(self, idx: Any = ()) -> jax.Array:
        """Reads the elements."""
        return self.at[idx]._access(_jax.get_p)

    def swap(self, value: Any, idx: Any = ()) -> jax.Array:
        """Writes the elements and returns their old values."""
        return self.at[idx]._access(_jax.swap_p, value)

    def set(self, value: Any, idx: Any = ()) -> None:
        """Writes the elements."""
        self.at[idx]._access(_jax.swap_p, value, is_read=False)

    def addupdate(self, value: Any, idx: Any = ()) -> None:
        """Adds to the elements: a load, an addition and a store of each thread."""
        self.at[idx]._access(_jax.addupdate_p, value)

    def _access(self, primitive: Any, *given: Any, is_read: bool = True) -> Any:
        """Applies JAX's primitive to the window, or else loads and stores elements."""
        aval = base_aval(self)
        aval.memory_space.check_access(aval, self.shape)
        new = [stored(value, self) for value in given]
        window = _window_of(self)
        if window is not None:
            new = [_in_shape(value, window.shape) for value in new]
            leaves, tree = jax.tree.flatten(window.transforms)
            result = primitive.bind(window.ref, *new, *leaves, tree=tree)
            is_sum = primitive is _jax.addupdate_p
            return None if is_sum else _in_shape(result, self.shape)
        elements = _by_element(self)
        old = elements.load(self) if is_read else None
        for value in new:
            is_sum = primitive is _jax.addupdate_p
            elements.store(self, jax.lax.add(old, value) if is_sum else value)
        return old

    def reshape(self, *shape: Any) -> RefView:
        """Returns a view of the elements in another shape, in row-major order."""
        if len(shape) == 1 and expect.is_sequence(shape[0]):
            shape = tuple(shape[0])
        new = _reshaped(shape, self.shape)
        if new == self.shape:
            return self
        return RefView(self.ref, (*self.transforms, _jax.ReshapeTransform(new)))

    def bitcast(self, dtype: Any) -> RefView:
        """Returns a view of the same bytes as elements of another type.

        If its width is another, the last dimension changes, as in NumPy's
        `array.view(dtype)`.
        """
        dtype = jnp.dtype(values.element_type(dtype, "bitcast: dtype"))
        if dtype == self.dtype:
            return self
        _check_bitcast(self, dtype)
        return RefView(self.ref, (*self.transforms, _jax.BitcastTransform(dtype)))

    def memory_space_cast(self, memory_space: Any) -> RefView:
        """Returns the reference itself, in its own memory space; refuses another."""
        own = getattr(base_aval(self), "memory_space", None)
        if memory_space is own:
            return self
        raise errors.UnsupportedError(
            "memory_space_cast of a reference to another memory space",
            expected=expect.shown(own),
            got=expect.shown(memory_space),
            hint="a part of memory has one space: copy the elements to the other one",
        )

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, idx: Any) -> jax.Array:
        return self.at[idx].get()

    def __setitem__(self, idx: Any, value: Any) -> None:
        self.at[idx].set(value)


_jax.register_view(RefView)


class _At:
    """What `ref.at` returns: an index expression on it selects a part."""

    def __init__(self, view: RefView):
        self._view = view

    def __getitem__(self, idx: Any) -> RefView:
        view = self._view
        if _selects_all(idx):
            return view
        steps = getattr(base_aval(view), "index_steps", index_steps)
        return RefView(view.ref, (*view.transforms, *steps(idx, view.shape)))


class _ByPart:
    """Accesses to a view of more dimensions than an operation accesses: in TMEM."""

    @staticmethod
    def load(view: RefView) -> jax.Array:
        return jnp.stack([view.at[i].get() for i in range(len(view))])

    @staticmethod
    def store(view: RefView, value: jax.Array) -> None:
        for i in range(len(view)):
            view.at[i].set(value[i])


def has_parts(view: RefView) -> bool:
    """Whether a view has more dimensions than one operation accesses."""
    rank = base_aval(view).memory_space.access_rank
    return rank is not None and len(view.shape) > rank


_BY_ELEMENT: list[Any] = []


def access_by_element(accesses: Any) -> None:
    """Registers the accesses with an index for each element, which are defined above.

    Args:
      accesses: has `load(view)` and `store(view, value)`, for views in SMEM or GMEM.
    """
    _BY_ELEMENT.append(accesses)


def _by_element(view: RefView) -> Any:
    if has_parts(view):
        return _ByPart
    aval = base_aval(view)
    if not aval.memory_space.has_addresses:
        raise errors.UnsupportedError(
            "elements of a reference without addresses",
            expected="integers, slices of stride 1 and transposes of it",
            got=f"{describe(view)}, indexed or reshaped element by element",
            hint=aval.memory_space.by_element,
        )
    return _BY_ELEMENT[0]


def _window_of(view: RefView) -> RefView | None:
    """Returns the window that has a view's elements, in their order; None without one.

    If its shape is another one, it only has more or fewer axes of size 1.
    """
    if has_parts(view) or view.is_window:
        return None if has_parts(view) else view
    count = next(i for i, s in enumerate(view.transforms) if not is_window(s))
    window, rest = RefView(view.ref, view.transforms[:count]), view.transforms[count:]
    units = [n for n in view.shape if n != 1] == [n for n in window.shape if n != 1]
    reshaped = all(isinstance(step, _jax.ReshapeTransform) for step in rest)
    return window if units and reshaped else None


def _in_shape(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return value if value.shape == shape else value.reshape(shape)


def _reshaped(given: Sequence[Any], shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = [expect.index(n) for n in given]
    total, unknown = math.prod(shape), sizes.count(-1)
    known = math.prod(n for n in sizes if n is not None and n != -1)
    if unknown == 1 and known and total % known == 0:
        sizes[sizes.index(-1)] = total // known
    new = tuple(n for n in sizes if n is not None and n > 0)
    if len(new) < len(sizes) or math.prod(new) != total:
        raise errors.ShapeError(
            "reshape of a reference to another number of elements",
            expected=f"sizes with the product {total}, of which one may be -1",
            got=expect.shown(tuple(given)),
            hint=f"the reference has shape {shape}",
        )
    return new


def _check_bitcast(view: RefView, dtype: Any) -> None:
    before, after = jnp.dtype(view.dtype), dtype
    bits = [itemsize_bits(t) for t in (before, after)]
    if before == jnp.bool_ or after == jnp.bool_ or min(bits) < 8:
        raise errors.DTypeError(
            "bitcast of a reference: elements of less than a byte, or bools",
            expected="types of 8, 16, 32 or 64 bits",
            got=f"{before.name} to {after.name}",
            hint="convert the value: ref[...].astype(dtype)",
        )
    last = view.shape[-1] if view.shape else 1
    if bits[0] != bits[1] and (not view.shape or last * bits[0] % bits[1]):
        raise errors.ShapeError(
            "bitcast of a reference: the last dimension is not whole elements",
            expected=f"a multiple of {bits[1] // math.gcd(*bits)} elements of "
            f"{before.name}",
            got=f"{last} in shape {view.shape}",
            hint="slice or reshape the reference first",
        )


def _selects_all(idx: Any) -> bool:
    entries = idx if isinstance(idx, tuple) else (idx,)
    return entries == () or (len(entries) == 1 and entries[0] is ...)


def _permutation(given: tuple[Any, ...], rank: int) -> tuple[int, ...]:
    if not given or (len(given) == 1 and given[0] is None):
        return tuple(reversed(range(rank)))
    if len(given) == 1 and expect.is_sequence(given[0]):
        given = tuple(given[0])
    axes = [expect.index(axis) for axis in given]
    order = tuple(n + rank * (n < 0) for n in axes if n is not None)
    if len(order) != len(axes) or sorted(order) != list(range(rank)):
        raise errors.ArgumentError(
            "transpose of a reference: not a permutation of its dimensions",
            expected=f"each of 0 to {rank - 1} once",
            got=expect.shown(given),
            hint="name every dimension once",
        )
    return order


def stored(value: Any, view: RefView, what: str = "a value that is stored") -> Any:
    """Returns a value with the dtype and shape of a reference, for a store.

    A Python number is converted to the reference's dtype, and a scalar is broadcast.
    """
    if isinstance(base_aval(value), _jax.AbstractRef):
        raise errors.ArgumentTypeError(
            "a reference is stored into a reference",
            expected="a value",
            got=describe(value),
            hint="read it first: source_ref[...]",
        )
    value = values.array(value, what)
    shape, dtype = tuple(view.shape), jnp.dtype(view.dtype)
    if value.weak_type and jnp.result_type(dtype, value) == dtype:
        value = jax.lax.convert_element_type(value, dtype)
    if value.dtype != dtype:
        hint = f"convert it with .astype(jnp.{dtype.name})"
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            hint += ', which needs jax.config.update("jax_enable_x64", True)'
        raise errors.DTypeError(
            "a value is stored into a reference of another element type",
            expected=describe(view),
            got=f"{value.dtype.name}{list(value.shape)}",
            hint=hint,
        )
    if value.shape != shape and value.shape != ():
        raise errors.ShapeError(
            "a value is stored into a reference of another shape",
            expected=describe(view),
            got=f"{value.dtype.name}{list(value.shape)}",
            hint="slice the larger one, or use jnp.broadcast_to",
        )
    return value if value.shape == shape else jnp.broadcast_to(value, shape)


class IndexableRef(_jax.AbstractRef):
    """A reference of this package, which has our own indexing.

    Attributes:
      inner_aval: shape and dtype.
      memory_space: a `Resource`.
      details: what its type has besides.
    """

    __slots__ = ["details"]

    def __init__(
        self,
        inner_aval: Any,
        memory_space: Any = None,
        kind: Any = None,
        details: Any = ROW_MAJOR,
    ):
        super().__init__(inner_aval, memory_space, kind)
        self.details = details

    def update(self, inner_aval=None, memory_space=None, kind=None):
        return type(self)(
            self.inner_aval if inner_aval is None else inner_aval,
            self.memory_space if memory_space is None else memory_space,
            self.kind if kind is None else kind,
            self.details,
        )

    def __eq__(self, other):
        return type(other) is type(self) and self._key == other._key

    def __hash__(self):
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        return type(self), self.inner_aval, self.memory_space, self.details

    def _getitem(self, tracer: Any, idx: Any) -> jax.Array:
        return RefView(tracer, ())[idx]

    def _setitem(self, tracer: Any, idx: Any, value: Any) -> None:
        RefView(tracer, ())[idx] = value


def _of_view(name: str) -> Any:
    """Returns what a traced reference has by a name: that of the view of all of it."""
    if isinstance(vars(RefView)[name], property):
        return aval_property(lambda tracer: getattr(RefView(tracer, ()), name))
    return aval_method(
        lambda tracer, *a, **kw: getattr(RefView(tracer, ()), name)(*a, **kw)
    )


for _name in (
    "at", "T", "transpose", "get", "set", "swap", "addupdate", "reshape", "bitcast",
    "memory_space_cast",
):  # fmt: skip
    setattr(IndexableRef, _name, _of_view(_name))


class KernelRef(IndexableRef):
    """A reference to an array in GMEM, SMEM, TMEM or registers."""

    __slots__ = ()

    @property
    def storage(self) -> Storage:
        """How the array is stored."""
        return self.details

    @property
    def transforms(self) -> tuple[Any, ...]:
        """From the logical shape to the stored form."""
        return self.storage.transforms

    def str_short(self, short_dtypes=False, mesh_axis_types=False) -> str:
        inner = self.inner_aval.str_short(
            short_dtypes=short_dtypes, mesh_axis_types=mesh_axis_types
        )
        storage = f", {self.storage}" if str(self.storage) else ""
        return f"Ref<{self.memory_space}>{{{inner}{storage}}}"


# JAX's memory spaces, by name, as those in which this package has such references.
SPACES_OF_JAX: dict[str, Resource] = {}


@expect.arguments(permutation=expect.anything)
def transpose_ref(ref: Any, permutation: Sequence[int]) -> RefView:
    """Returns a view of a reference with its dimensions permuted.

    PTX: none, it is part of an address. Since: sm_90.

    Args:
      ref: a reference, or a part of one.
      permutation: for each dimension of the view, the reference's.

    Raises:
      ArgumentTypeError: `ref` is not a reference.
      ArgumentError: not a permutation of its dimensions.
    """
    if base_aval(ref) is None:
        raise errors.ArgumentTypeError(
            "transpose_ref: not a reference",
            expected="a reference (an argument or scratch of the kernel)",
            got=expect.shown(ref),
            hint="transpose an array with jnp.transpose",
        )
    return ref.transpose(permutation)


def as_view(ref: Any) -> RefView:
    """Returns a reference, or a part of one, also of JAX's making, as a part."""
    if isinstance(ref, RefView):
        return ref
    if isinstance(ref, _jax.TransformedRef):
        return RefView(ref.ref, tuple(ref.transforms))
    return RefView(ref, ())


def base_aval(ref: Any) -> Any:
    """Returns the abstract reference under a tracer, a view or an abstract value.

    A `jax.Ref` that a kernel closes over, and references in a body of JAX's own
    `pallas_call`, are described as this package will have them.
    """
    while isinstance(ref, _jax.TransformedRef):
        ref = ref.ref
    aval = ref if isinstance(ref, _jax.AbstractRef) else values.abstract(ref)
    if type(aval) is _jax.AbstractRef:
        space = aval.memory_space
        if not isinstance(space, Resource):
            space = SPACES_OF_JAX.get(str(space).lower())
        if isinstance(space, Resource):
            return KernelRef(aval.inner_aval, space)
    return aval if isinstance(aval, _jax.AbstractRef) else None


def describe(ref: Any) -> str:
    """Returns memory space, dtype and shape of a reference for error messages."""
    aval = base_aval(ref)
    if aval is None:
        return f"{expect.shown(ref)}, not a reference"
    if not isinstance(aval.memory_space, Resource):
        return f"{aval}, not a reference of a kernel"
    if isinstance(ref, RefView) and ref.dtype != aval.dtype:
        name = jnp.dtype(ref.dtype).name
        return f"{aval.memory_space.name} {name}{list(ref.shape)}"
    return aval.memory_space.describe(aval, ref.shape)
