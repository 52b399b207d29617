"""Every exception that Quire raises on purpose. Imports no other module of Quire, so that all may import it.

All are `ValueError`s: the caller gave an argument that cannot be honoured. The message names the argument, the place,
the value and a valid alternative. The errors of the operators also carry a `status`, the name of the error for callers
of a C interface. The end of the module has checks of numbers and names that several packages share.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from functools import wraps
from importlib.util import find_spec
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")


class QuireError(ValueError):
    """Base class of all errors that Quire raises on purpose.

    Example:
        ```python
        from quire import SamplingParams
        from quire.errors import QuireError

        try:
            SamplingParams(temperature=-1.0)
        except QuireError as error:
            print(error)
        ```
    """


class BadShape(QuireError):
    """A tensor has the wrong number of dimensions or a size that does not fit the others."""

    status: ClassVar[str] = "BAD_SHAPE"


class BadDtype(QuireError):
    """A tensor has a dtype that this argument does not take."""

    status: ClassVar[str] = "BAD_DTYPE"


class BadStride(QuireError):
    """A tensor's memory layout is not supported.

    Its last dimension is not contiguous, or it is written and shares memory with itself or with another argument.
    """

    status: ClassVar[str] = "BAD_STRIDE"


class BadValue(QuireError):
    """A number, or an entry of an integer tensor, is out of range."""

    status: ClassVar[str] = "BAD_VALUE"


class Unsupported(QuireError):
    """The request is valid, but this backend, device or model family does not support it."""

    status: ClassVar[str] = "UNSUPPORTED"


class ConfigError(QuireError):
    """An option of the engine is unknown, malformed or cannot be satisfied."""


class RequestError(QuireError):
    """A request or its sampling parameters are invalid, or the request can never fit. It was not accepted.

    Args:
        message: the text of the error.
        field: the invalid part of the request: "prompt", "priority", or a field of SamplingParams or BeamSearchParams.
            None if it is not a single one, or if the message does not come from the engine.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLong(RequestError):
    """A prompt has more tokens than the model takes."""


class ModelError(QuireError):
    """A checkpoint cannot be found, read, or understood."""


class OutOfBlocks(QuireError):
    """More KV blocks were requested than are free. The scheduler checks first; callers of BlockPool may see it."""


class EngineStopped(QuireError):
    """The engine was closed or has failed. Calls that wait for it end with this error.

    Args:
        why: the reason, which the message reports.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"the engine has stopped: {why}")
        self.why = why


class EngineAsleep(QuireError):
    """The engine sleeps, so it takes no prompts. Its memory is free until `wake_up` is called."""

    def __init__(self) -> None:
        super().__init__("the engine sleeps and takes no prompts; call wake_up() first")


class GroupLost(QuireError):
    """A rank of a tensor-parallel group has died or hangs, so the group cannot compute any more."""


class NoReplica(QuireError):
    """No replica of the fleet can accept a request now. The request may be valid and can be sent again."""


class MissingPackage(QuireError, ModuleNotFoundError):
    """A package that a part of Quire needs is not installed: Quire was installed without its dependencies.

    Args:
        part: the package of Quire that imports the modules.
        *modules: the modules that cannot be imported. The attribute `name` is the first of them.
    """

    def __init__(self, part: str, *modules: str) -> None:
        super().__init__(
            f"{part} needs packages that are not installed: {', '.join(modules)}. Install these, or all that Quire "
            "needs: pip install quire"
        )
        self.name = modules[0]


def check_installed(part: str, *modules: str) -> None:
    """Raise MissingPackage unless all of these modules can be imported. The arguments are those of that error."""
    if missing := [module for module in modules if find_spec(module) is None]:
        raise MissingPackage(part, *missing)


def check_integer(error: type[QuireError], name: str, value: object, lower: int, upper: int | None = None) -> None:
    """Raise `error` unless the value is an integer in lower..upper."""
    if isinstance(value, bool) or not isinstance(value, (int, Integral)):
        raise error(f"{name} is {value!r}; it must be an integer")
    number = int(value)
    if number < lower or (upper is not None and number > upper):
        bounds = f"at least {lower}" if upper is None else f"in {lower}..{upper}"
        raise error(f"{name} is {value}; it must be {bounds}")


def are_counts(*values: object) -> bool:
    """Return whether all values are plain non-negative integers. A fast path, since most are."""
    for value in values:  # noqa: SIM110 (a generator takes twice as long)
        if type(value) is not int or value < 0:
            return False
    return True


def are_times(*values: object) -> bool:
    """Return whether all values are finite non-negative floats. A fast path, since most are."""
    for value in values:  # noqa: SIM110 (a generator takes twice as long)
        if type(value) is not float or not 0.0 <= value < math.inf:
            return False
    return True


def check_number(error: type[QuireError], name: str, value: object, lower: float, upper: float = math.inf) -> None:
    """Raise `error` unless the value is a finite number in lower..upper."""
    if isinstance(value, bool) or not isinstance(value, (float, Real)):
        raise error(f"{name} is {value!r}; it must be a number")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        number = math.inf
    if not (math.isfinite(number) and lower <= number <= upper):
        bounds = f"at least {lower:g}" if math.isinf(upper) else f"in {lower:g}..{upper:g}"
        raise error(f"{name} is {value}; it must be finite and {bounds}")


def check_known(
    error: type[QuireError], lacks: str, given: Iterable[str], known: Collection[str], refused: Mapping[str, str]
) -> None:
    """Raise `error` for a name that is not in `known`, with its text in `refused` or else the most similar known name.

    `lacks` is the beginning of the message, before the name.
    """
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}"
            raise error(f"{lacks} {name!r}; {refused.get(name, hint)}")


def checked(
    error: type[QuireError],
    lacks: str,
    refused: Mapping[str, str],
    neutral: Mapping[str, object] = MappingProxyType({}),
) -> Callable[[type[T]], type[T]]:
    """Return a decorator of a dataclass that raises `error` for an unknown field, in place of a TypeError.

    Args:
        error: the class of the error.
        lacks: the beginning of the error message, before the name of the field.
        refused: fields of vLLM's, each with the reason. None and False are neutral, so they are accepted.
        neutral: more neutral values of such fields.
    """

    def decorate(cls: type[T]) -> type[T]:
        init: Callable[..., None] = cls.__init__
        known = {one.name for one in fields(cls)}  # type: ignore[arg-type]

        @wraps(init)
        def __init__(self: T, *args: Any, **given: Any) -> None:
            if not given.keys() <= known:
                vllm = {name: value for name, value in given.items() if name in refused and name not in known}
                asked = {
                    name
                    for name, value in vllm.items()
                    if value is not None and value is not False and (name not in neutral or value != neutral[name])
                }
                given = {name: value for name, value in given.items() if name not in vllm or name in asked}
                check_known(error, lacks, given, known, refused)
            init(self, *args, **given)

        __init__.__signature__ = inspect.signature(init, eval_str=True)  # type: ignore[attr-defined]
        cls.__init__ = __init__  # type: ignore[assignment]
        return cls

    return decorate
