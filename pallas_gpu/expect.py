# SPDX-License-Identifier: Apache-2.0
"""Rules for the arguments of public functions, stated by their signatures.

    @expect.arguments(n=expect.integer(0))
    def wait_smem_to_gmem(n: int, wait_read_only: bool = False) -> None: ...

A rule is a function of a value and the words that name it in messages. It returns the
value in its normal form (a tuple for a list) or raises an error. The annotation of a
parameter implies its rule (`annotated`), and `Annotated[..., rule]` names one; the
decorator names those that differ. Rules for values that JAX traces are in
`types/values.py`.
"""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAliasType, Union, get_args, get_origin

from pallas_gpu import errors

type Rule = Callable[[Any, str], Any]

_LOCATE: list[Callable[[], str | None]] = []
_EXPLAIN: list[Callable[[Any, str], None]] = []
_NAME: list[Callable[[Any], str | None]] = []


def locate_with(where: Callable[[], str | None]) -> None:
    """Registers the function that returns the user's line that is running."""
    _LOCATE[:] = [where]


def name_with(kind: Callable[[Any], str | None]) -> None:
    """Registers a function that returns what authors call an array, None for others."""
    _NAME[:] = [kind]


def explain_with(refuse: Callable[[Any, str], None]) -> None:
    """Registers a check of the arguments of a call that fails.

    Args:
      refuse: `refuse(arguments, who)` raises if it has a better error.
    """
    _EXPLAIN[:] = [refuse]


def arguments[T: Callable[..., Any]](
    who: str | Callable[..., str] | None = None,
    hint: str | Mapping[str, str] | None = None,
    /,
    **rules: Rule,
) -> Callable[[T], T]:
    """Returns a decorator that checks the arguments of a function or a dataclass.

    Errors of the function that have no line get the line of the call. A subclass
    inherits the rules of its base.

    Args:
      who: the name in messages, also as a function of the arguments; default: that of
        the function or class, `Class.method` for a method.
      hint: for calls whose arguments do not fit the parameters; or one for each name
        that is known to be passed and is not a parameter.
      **rules: rules that differ from those that the annotations imply, by parameter.

    Raises:
      InternalError: a rule without a parameter.
    """

    def decorate(target: Any) -> Any:
        name = target.__qualname__.rpartition("<locals>.")[2]
        named = who if callable(who) else lambda *_, **__: who or name
        if not isinstance(target, type):
            return _checked(target, named, hint, rules)
        own = {**getattr(target, "__expected__", {}), **rules}
        init = _checked(vars(target)["__init__"], named, hint, own)
        setattr(target, "__init__", init)  # noqa: B010 - mypy refuses the assignment
        setattr(target, "__expected__", own)  # noqa: B010
        return target

    return decorate


def _checked(
    fn: Callable[..., Any],
    who: Callable[..., str],
    hint: str | Mapping[str, str] | None,
    rules: Mapping[str, Rule],
) -> Callable[..., Any]:
    parameters = inspect.signature(fn).parameters
    if not set(rules) <= set(parameters):
        raise errors.InternalError(
            f"{fn.__qualname__}: rules without parameters",
            expected=f"some of {list(parameters)}",
            got=sorted(rules),
        )
    kinds = {p.kind: name for name, p in parameters.items()}
    rest = kinds.get(inspect.Parameter.VAR_POSITIONAL)
    others = kinds.get(inspect.Parameter.VAR_KEYWORD)
    by_position = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    ordered = [name for name, p in parameters.items() if p.kind in by_position]

    @functools.cache
    def checks() -> dict[str, Rule]:
        # When it is called all names of the annotations are defined.
        generic = {kind.__name__: kind for kind in fn.__type_params__}
        hints = inspect.get_annotations(fn, locals=generic, eval_str=True)
        implied = {name: annotated(hint) for name, hint in hints.items()}
        every = {**implied, **rules}
        return {name: rule for name, rule in every.items() if rule is not anything}

    def check(names: Iterable[Any], values: Iterable[Any], prefix: str) -> list[Any]:
        every = checks()
        return [
            rule(x, f"{prefix}: {name}") if (rule := every.get(name)) else x
            for name, x in zip(names, values, strict=False)
        ]

    @functools.wraps(fn)
    def checked(*args: Any, **named: Any) -> Any:
        # The object of a constructor has no fields yet.
        first = 1 if fn.__name__ == "__init__" else 0
        prefix, given = who(*args, **named), (args[first:], named)
        try:
            places = itertools.chain(ordered, itertools.repeat(rest))
            args = tuple(check(places, args, prefix))
            if named:
                known = (n if n in parameters else others for n in named)
                values = check(known, named.values(), prefix)
                named = dict(zip(named, values, strict=True))
            return fn(*args, **named)
        except errors.PallasGpuError as error:
            for refuse in _EXPLAIN:
                refuse(given, prefix)
            if _LOCATE and not _is_ours(sys._getframe(1)):
                error.with_location(_LOCATE[0]())
            raise
        except TypeError:
            misfit = _misfit(fn, args, named, prefix, hint)
            if misfit is None:
                raise
            try:
                raise misfit.with_location(_LOCATE[0]() if _LOCATE else None) from None
            finally:
                del misfit  # its traceback holds this frame

    checked.__expected__ = rules  # type: ignore[attr-defined]
    return checked


def _misfit(
    fn: Callable[..., Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
    who: str,
    given_hint: str | Mapping[str, str] | None,
) -> errors.ArgumentTypeError | None:
    """Returns the error for arguments that no call of a function has."""
    signature = inspect.signature(fn)
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        kept = [p for p in signature.parameters.values() if p.name != "self"]
        unknown = [name for name in named if name not in signature.parameters]
        close = difflib.get_close_matches("".join(unknown[:1]), [p.name for p in kept])
        by_name = [p.name for p in kept if p.kind is inspect.Parameter.KEYWORD_ONLY]
        hint = given_hint if isinstance(given_hint, str) else None
        known = given_hint if isinstance(given_hint, Mapping) else {}
        instead = next((known[name] for name in unknown if name in known), None)
        if instead is not None:
            hint = instead
        elif close:
            hint = f"did you mean {close[0]}?"
        elif hint is None and "too many positional" in str(error) and by_name:
            hint = f"pass {by_name[0]}=... by name"
        return errors.ArgumentTypeError(
            f"{who}: the arguments do not fit the parameters",
            expected=", ".join(p.name for p in kept) or "no arguments",
            got=str(error),
            hint=hint or "its docstring, as help() shows it, explains the parameters",
        )
    return None


def _is_ours(frame: FrameType) -> bool:
    """True for a call from the package: its own caller knows a better line."""
    return frame.f_globals.get("__name__", "").startswith(f"{__package__}.")


# --- how values are shown -------------------------------------------------------------


def shown(value: Any) -> str:
    """Returns a short description of any value for an error message."""
    kind = type(value).__name__
    try:
        if not isinstance(value, type) and hasattr(value, "shape"):
            called = next((k for f in _NAME if (k := f(value))), kind)
            return f"{called} {value.dtype}{list(value.shape)}"
    except Exception:
        pass
    try:
        text = repr(value)
    except Exception:
        return f"a {kind}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def wrong_type(
    what: str, kind: str, expected: str, value: Any, hint: str
) -> errors.ArgumentTypeError:
    """Returns the error for a value of another type."""
    return errors.ArgumentTypeError(
        f"{what} is not {kind}", expected=expected, got=shown(value), hint=hint
    )


# --- rules that annotations imply -----------------------------------------------------


def annotated(hint: Any) -> Rule:
    """Returns the rule of a parameter with an annotation; `anything` by default.

    Numbers, strings, functions, members of an enumeration, literal strings, and
    sequences of integers or strings are what they say; so is an object of a dataclass
    whose arguments are checked. An alternative None is accepted.
    """
    if isinstance(hint, TypeAliasType):
        return annotated(hint.__value__)
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return parts[1]
    if hint in _IMPLIED:
        return _IMPLIED[hint]
    if origin is Literal:
        return choice(*parts)
    if origin is Callable:
        return function
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return member(hint)
    if origin not in (Union, UnionType):
        return _declared(hint)
    if NoneType in parts:
        rule = annotated(Union[tuple(x for x in parts if x is not NoneType)])  # noqa: UP007
        return rule if rule is anything else optional(rule)
    return _declared(*parts)


def _declared(*kinds: Any) -> Rule:
    """Returns the rule for objects of dataclasses whose arguments are checked."""
    if not all(isinstance(x, type) and "__expected__" in vars(x) for x in kinds):
        return anything
    written = [f"{_public(x)}(...)" for x in kinds]
    first = ", ".join(written[:-1])
    return instance(*kinds, written=" or ".join(x for x in (first, written[-1]) if x))


def _public(kind: type) -> str:
    """Returns the name by which users import a class."""
    room = kind.__module__.split(".")[1:2]
    return ".".join(["plgpu", *(room if room == ["ops"] else []), kind.__name__])


# --- rules ----------------------------------------------------------------------------


def anything(value: Any, what: str) -> Any:
    """Accepts every value: any is right, or the function checks it itself."""
    return value


def optional(rule: Rule) -> Rule:
    """Accepts None, and what the rule accepts."""
    return lambda value, what: None if value is None else rule(value, what)


def refused(default: Any, hint: str) -> Rule:
    """Accepts the default alone: the package does not support the parameter yet."""

    def check(value: Any, what: str) -> Any:
        if value is default or (type(value) is type(default) and value == default):
            return value
        raise errors.UnsupportedError(
            f"{what} is not supported",
            expected=f"{default!r}, the default",
            got=shown(value),
            hint=hint,
        )

    return check


def index(value: Any) -> int | None:
    """Returns a static integer as an int; None for every other value."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except Exception:
        return None


def integer(
    minimum: int | None = None,
    maximum: int | None = None,
    *,
    unit: str = "",
    hint: str = "",
    out_of_range: str = "is out of range",
) -> Rule:
    """Accepts static integers in a range, both ends included."""
    wanted = _range(minimum, maximum, unit)

    def check(value: Any, what: str) -> int:
        number = index(value)
        if number is None:
            raise wrong_type(
                what,
                "an integer",
                f"a Python integer{', ' if wanted else ''}{wanted}",
                value,
                hint or "it has to be known when the kernel is traced",
            )
        if not _within(number, minimum, maximum):
            raise errors.ArgumentError(
                f"{what} {out_of_range}",
                expected=wanted,
                got=number,
                hint=hint or f"choose {wanted}",
            )
        return number

    return check


def integers(
    minimum: int | None = None,
    maximum: int | None = None,
    *,
    hint: str = "",
    out_of_range: str = "is out of range",
) -> Rule:
    """Accepts sequences of static integers, or one integer, as a tuple of its own."""
    wanted = _range(minimum, maximum, "")
    each = integer(minimum, maximum, hint=hint, out_of_range=out_of_range)

    def check(value: Any, what: str) -> tuple[int, ...]:
        if index(value) is not None:
            value = (value,)
        if not is_sequence(value) or any(index(n) is None for n in value):
            raise wrong_type(
                what,
                "a sequence of integers",
                f"Python integers{', each ' if wanted else ''}{wanted}",
                value,
                hint or "they have to be known when the kernel is traced",
            )
        return tuple(each(n, what) for n in value)

    return check


def is_sequence(value: Any) -> bool:
    """True for lists, tuples and other ordered collections; false for strings."""
    if isinstance(value, (str, bytes, Mapping, set, frozenset, type)):
        return False
    return hasattr(value, "__len__") and _iterates(value)


def _iterates(value: Any) -> bool:
    try:
        iter(value)
    except Exception:
        return False
    return True


def _range(minimum: int | None, maximum: int | None, unit: str) -> str:
    unit = f" {unit}" if unit else ""
    if minimum is None and maximum is None:
        return ""
    if maximum is None:
        return f"{minimum} or more{unit}"
    if minimum is None:
        return f"at most {maximum}{unit}"
    return f"{minimum} to {maximum}{unit}"


def _within(number: float, minimum: float | None, maximum: float | None) -> bool:
    low = minimum is None or number >= minimum
    return low and (maximum is None or number <= maximum)


def number(value: Any, what: str) -> float:
    """Accepts static numbers."""
    if not isinstance(value, (bool, str, bytes)):
        try:
            return float(value)
        except Exception:
            pass
    raise wrong_type(
        what, "a number", "a Python number", value, "it has to be known when traced"
    )


def boolean(value: Any, what: str) -> bool:
    """Accepts True and False."""
    if isinstance(value, bool):
        return value
    raise wrong_type(what, "a bool", "True or False", value, "pass True or False")


def string(value: Any, what: str) -> str:
    """Accepts strings."""
    if isinstance(value, str):
        return value
    raise wrong_type(what, "a string", "a string", value, "pass its name as a string")


def names(value: Any, what: str) -> tuple[Any, ...]:
    """Accepts a name or a sequence of names, strings or tuples of them, as a tuple."""
    if isinstance(value, str):
        return (value,)
    if is_sequence(value) and all(map(_is_name, value)):
        return tuple(value)
    raise wrong_type(
        what,
        "a name or a sequence of names",
        "strings",
        value,
        "name axes by strings, e.g. ('x', 'y')",
    )


def _is_name(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, tuple) and all(map(_is_name, value))
    )


def choice(*values: str | None, hint: str = "") -> Rule:
    """Accepts some strings."""
    wanted = " or ".join(map(repr, values))

    def check(value: Any, what: str) -> Any:
        if (value is None or isinstance(value, str)) and value in values:
            return value
        prefix, _, name = what.partition(": ")
        raise errors.ArgumentError(
            f"{prefix}: invalid value of {name}",
            expected=wanted,
            got=shown(value),
            hint=hint or f"leave it out for {values[0]!r}",
        )

    return check


def multiple(of: int, maximum: int | None = None, *, hint: str = "") -> Rule:
    """Accepts static integers that are positive multiples of another one."""
    wanted = f"a multiple of {of}" + (f" up to {maximum}" if maximum else "")
    return _some(lambda n: _within(n, of, maximum) and n % of == 0, wanted, hint)


def choice_of(*values: int, hint: str = "") -> Rule:
    """Accepts some integers."""
    return _some(lambda n: n in values, " or ".join(map(str, values)), hint)


def _some(fits: Callable[[int], bool], wanted: str, hint: str) -> Rule:
    def check(value: Any, what: str) -> int:
        number = index(value)
        if number is not None and fits(number):
            return number
        raise errors.ArgumentError(
            f"{what} is not supported",
            expected=wanted,
            got=shown(value),
            hint=hint or f"choose {wanted}",
        )

    return check


def arrays(value: Any, what: str) -> Any:
    """Accepts what has the shape and the element type of an array."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if not isinstance(value, type) and isinstance(shape, tuple) and dtype is not None:
        return value
    raise wrong_type(what, "an array", "an array", value, "pass jnp.asarray(...)")


def member(kind: type[enum.Enum], prefix: str = "plgpu") -> Rule:
    """Accepts the members of an enumeration, not their names or values."""
    listed = [f"{prefix}.{kind.__name__}.{m.name}" for m in kind]

    def check(value: Any, what: str) -> enum.Enum:
        if isinstance(value, kind):
            return value
        meant = [
            text
            for text, m in zip(listed, kind, strict=True)
            if isinstance(value, str) and value.lower() in (m.name.lower(), m.value)
        ]
        raise wrong_type(
            what,
            f"a member of {kind.__name__}",
            " or ".join(listed),
            value,
            f"write {(meant or listed)[0]}",
        )

    return check


def instance(*kinds: type, written: str) -> Rule:
    """Accepts instances of some classes; `written` says how one is made."""

    def check(value: Any, what: str) -> Any:
        if isinstance(value, kinds):
            return value
        raise wrong_type(
            what,
            f"a {' or a '.join(k.__name__ for k in kinds)}",
            written,
            value,
            f"write {written}",
        )

    return check


def function(value: Any, what: str) -> Callable[..., Any]:
    """Accepts functions and other callables, except classes and our declarations."""
    ours = hasattr(getattr(type(value), "__call__", None), "__expected__")  # noqa: B004
    if callable(value) and not isinstance(value, type) and not ours:
        return value
    raise wrong_type(
        what, "a function", "a function", value, "pass the function itself"
    )


def signature_mismatch(
    f: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any], of: str
) -> tuple[str, str] | None:
    """Returns what a function should take and what it takes; None if that fits.

    Args:
      f: the function.
      args, named: what was passed.
      of: what the arguments are, e.g. "references".
    """
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        by_name = f", and {sorted(named)} by name" if named else ""
        found = f"{getattr(f, '__name__', 'function')}{signature}: {error}"
        things = of.removesuffix("s") if len(args) == 1 else of
        return f"{len(args)} positional {things}{by_name}", found
    return None


def takes(f: Callable[..., Any], what: str, args: Sequence[Any], hint: str) -> None:
    """Raises ArgumentTypeError for a function that arguments cannot be passed to."""
    if (mismatch := signature_mismatch(f, args, {}, "arguments")) is not None:
        raise errors.ArgumentTypeError(
            f"{what} does not take what it is given",
            expected=f"a function of {mismatch[0]}",
            got=mismatch[1],
            hint=hint,
        )


_IMPLIED: dict[Any, Rule] = {
    bool: boolean,
    int: integer(),
    float: number,
    str: string,
    Sequence[int]: integers(),
    tuple[int, ...]: integers(),
    int | Sequence[int]: integers(),
    Sequence[str]: names,
    tuple[str, ...]: names,
    str | Sequence[str]: names,
}
