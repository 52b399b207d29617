"""A Jinja environment for programs by strangers: chat templates come with a model, and nobody has read them.

Jinja's sandbox keeps a template away from Python. This one keeps it from taking the machine besides: each step that a
template takes costs something, each operation that can make much of little pays for its result beforehand, and what is
left of a rendering's time and characters is looked at each time. Everything else is as transformers has it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import count
from string import Formatter
from typing import Any, TypeVar

from jinja2 import TemplateError, TemplateRuntimeError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 2.0  # of one rendering
MAX_WORK = 2**25  # characters and items that one rendering may make on its way
MAX_BITS = 4096  # of an integer
MAX_DIGITS = 100  # to which a number is rounded

# These make much of little, or take long over it, and no chat template is known to need them.
LEFT_OUT = ("batch", "center", "pprint", "slice", "striptags", "urlencode", "urlize", "wordwrap", "xmlattr")
PADDING = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})  # methods that take a width
STRIPPING = frozenset({"lstrip", "rstrip", "strip"})  # each letter is looked for among all that are given
REFUSED = frozenset({"maketrans", "to_bytes", "translate"})
# What follows the % of a conversion that is wider than 999 characters, or as wide as an argument says.
WIDE = re.compile(r"(\([^)]*\))?[-#0 +]*(\*|\d{4}|\d*\.(\*|\d{4}))")
WIDE_FIELD = re.compile(r"\{|\d{4}")  # in what follows a field's colon

TOO_MUCH = f"it makes more than {MAX_WORK:,} characters and items"
LOOK_UP = 2**16  # items of a container after which the clock is looked at
VIEWS: tuple[type[Collection[Any]], ...] = (type({}.keys()), type({}.values()), type({}.items()))
CONTAINERS: tuple[type[Collection[Any]], ...] = (list, tuple, dict, set, frozenset, *VIEWS)

Filter = Callable[..., Any]
T = TypeVar("T")


class Raised(TemplateError):
    """The template itself has called raise_exception."""


class Refused(TemplateRuntimeError):
    """The template takes too long, or makes too much."""


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one rendering, or for the compilation of one template."""

    intercepted_binops = frozenset("+ * ** %".split())

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], finalize=self._finalize
        )
        self._deadline = time.monotonic() + MAX_SECONDS
        self._left = MAX_WORK
        own: dict[str, Callable[..., Any]] = {
            "format": self._format,
            "indent": self._indent,
            "join": self._join,
            "replace": self._replace,
            "round": self._round,
            "string": self._string,
            "sum": self._sum,
            "trim": self._trim,
        }
        for name in LEFT_OUT:
            del self.filters[name]
        for name, function in self.filters.items():
            self.filters[name] = self._paid(function, own.get(name))
        self.filters |= {
            "tojson": self._to_json,
            "_counted": self._counted,
            "_concat": self._concat,
            "_built": self._built,
            "_compared": self._compared,
        }
        del self.globals["lipsum"]
        self.globals |= {
            "dict": self._dict,
            "namespace": TemplateNamespace,
            "raise_exception": _raise,
            "strftime_now": _now,
        }

    def spend(self, amount: int) -> None:
        """Pay for something of that size. Raises Refused where the rendering cannot."""
        self._left -= max(0, amount)  # a negative width earns nothing
        if self._left < 0:
            raise Refused(TOO_MUCH)
        if time.monotonic() > self._deadline:
            raise Refused(f"it takes longer than {MAX_SECONDS:g} s")

    def parse_bounded(self, source: str) -> nodes.Template:
        """The template's syntax tree, in which loops, comparisons, `~` and literal lists pay."""
        tree = Bounds().visit(self.parse(source))
        tree.set_environment(self)
        return tree  # type: ignore[no-any-return]

    # --------------------------------------------------------------------------------- what the compiled code calls

    def concat(self, pieces: Iterable[str]) -> str:
        """A macro's or a block's text."""
        listed = list(pieces)
        self.spend(sum(map(len, listed)))
        return "".join(listed)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what the template calls."""
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        self.spend(1)
        if isinstance(owner, (str, bytes, int)):
            args = self._pay_method(owner, name, args, kwargs)
        return self._built(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`."""
        if operator == "%":
            if isinstance(left, (str, bytes)):
                self._pay_percent(left, right)
        elif operator == "+":
            if isinstance(left, (str, bytes, list, tuple)) and hasattr(right, "__len__"):
                self.spend(len(left) + len(right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise Refused(f"it computes an integer of more than {MAX_BITS} bits")
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, (str, bytes, list, tuple)) and isinstance(times, int):
                    self.spend(self._weigh(many) * times)
        return self._built(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format and str.format_map, which Jinja's sandbox replaces."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text: str = value.__self__

        def formatted(*args: Any, **kwargs: Any) -> str:
            fields = [spec or "" for _, name, spec, _ in Formatter().parse(text) if name is not None]
            if any(map(WIDE_FIELD.search, fields)):
                raise Refused("it formats a field that is too wide")
            self.spend(len(text) + len(fields) * self._weigh([args, kwargs]))
            return wrapped(*args, **kwargs)

        return formatted

    # ------------------------------------------------------------------------------------------------------ prices

    def _weigh(self, value: object) -> int:
        """About as many characters as the value's text has. Raises Refused where that is too much for any rendering.

        A list that stands twice in another one counts twice: in the text it would, too.
        """
        weight, pending = 0, [value]
        for i in count(1):
            item = pending.pop()
            if isinstance(item, (str, bytes)):
                weight += len(item) + 1
            elif isinstance(item, CONTAINERS):
                weight += 2 + 2 * len(item)
                pending += item
                if isinstance(item, dict):
                    pending += item.values()
            else:
                weight += 8
            if weight > MAX_WORK:
                raise Refused(TOO_MUCH)
            if i % LOOK_UP == 0:
                self.spend(1)
            if not pending:
                break
        return weight

    def _finalize(self, value: T) -> T:
        """Pay for the text of a list or the like that is printed; that of anything else is short or there already."""
        if isinstance(value, CONTAINERS):
            self.spend(self._weigh(value))
        return value

    def _pay_percent(self, text: str | bytes, values: Any) -> None:
        letters = text if isinstance(text, str) else text.decode("latin-1")
        _, *fields = letters.replace("%%", "").split("%")
        if any(map(WIDE.match, fields)):
            raise Refused("it formats a field that is too wide")
        self.spend(len(text) + len(fields) * self._weigh(values))

    def _pay_method(self, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Pay for a call of a method of a plain value. Returns the arguments for it."""
        if name in REFUSED:
            raise Refused(f"it calls {name}, which chat templates may not")
        if isinstance(owner, int):
            return args
        self.spend(len(owner))
        letters = [arg for arg in args if isinstance(arg, (str, bytes))]
        if name in PADDING:
            width = max(n for n in (*args, *kwargs.values(), 8) if isinstance(n, int))
            self.spend(width * (1 + owner.count("\t" if isinstance(owner, str) else b"\t")))
        elif name in STRIPPING and letters:
            self.spend(len(owner) * len(letters[0]))
        elif name == "replace" and len(letters) > 1:
            self.spend(owner.count(letters[0]) * len(letters[1]))
        elif name == "join" and args:
            args = (list(args[0]), *args[1:])
            self.spend(len(args[0]) * len(owner) + self._weigh(args[0]))
        return args

    def _paid(self, function: Filter, pay: Callable[..., Any] | None) -> Filter:
        """The filter, which is paid for by what it gets, and by `pay`."""
        passed = getattr(function, "jinja_pass_arg", None)
        at = 0 if passed is None else 1

        def paid(*args: Any, **kwargs: Any) -> Any:
            value = args[at]
            self.spend(len(value) if hasattr(value, "__len__") else 1)
            if pay is not None:
                args = (*args[:at], pay(*args[at:], **kwargs), *args[at + 1 :])
            return self._built(function(*args, **kwargs))

        if passed is not None:
            paid.jinja_pass_arg = passed  # type: ignore[attr-defined]
        return paid

    # Each of these pays for the filter of its name, and returns the value that this is to get.

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        self._pay_percent(str(value), [args, kwargs])
        return value

    def _indent(self, value: str, width: int | str = 4, *_: Any, **__: Any) -> Any:
        self.spend((str(value).count("\n") + 1) * (width if isinstance(width, int) else len(width)))
        return value

    def _join(self, value: Iterable[Any], d: Any = "", *_: Any, **__: Any) -> Any:
        items = list(value)
        self.spend(len(items) * len(str(d)) + self._weigh(items))
        return items

    def _replace(self, value: Any, old: str, new: str, *_: Any, **__: Any) -> Any:
        self.spend(str(value).count(str(old)) * len(str(new)))
        return value

    def _round(self, value: Any, precision: int = 0, *_: Any, **__: Any) -> Any:
        if abs(precision) > MAX_DIGITS:
            raise Refused(f"it rounds to {precision} digits; the most is {MAX_DIGITS}")
        return value

    def _string(self, value: Any) -> Any:
        self.spend(self._weigh(value))
        return value

    def _sum(self, value: Any, attribute: Any = None, start: Any = 0) -> Any:
        if not isinstance(start, (int, float)):
            raise Refused(f"it sums from {type(start).__name__} on; only numbers can be summed")
        return value

    def _trim(self, value: Any, chars: str | None = None) -> Any:
        self.spend(len(str(value)) * len(chars or ""))
        return value

    # --------------------------------------------------------------------------------- filters and functions of ours

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """As JSON. Jinja's own filter would escape HTML."""
        wide = indent if isinstance(indent, int) else len(indent or "")
        self.spend(self._weigh(value) * (1 + wide + sum(map(len, separators or ()))))
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def _counted(self, items: Iterable[Any]) -> Counted:
        return Counted(self, items)

    def _concat(self, items: list[Any]) -> str:
        """`a ~ b ~ c`."""
        self.spend(self._weigh(items))
        return "".join(map(str, items))

    def _built(self, value: T) -> T:
        """What was made, if it is not too big: a list that holds itself twice, again and again, grows without end."""
        if isinstance(value, CONTAINERS):
            self.spend(len(value))
            self._weigh(value)
        return value

    def _compared(self, value: T) -> T:
        self.spend(1)
        return value

    def _dict(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return self._built(dict(*args, **kwargs))


class Counted:
    """What a loop runs over; each turn is paid for."""

    def __init__(self, sandbox: Sandbox, items: Any) -> None:
        self._sandbox, self._items = sandbox, items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._sandbox.spend(1)
            yield item


class Bounds(NodeTransformer):
    """Puts a filter around each part of a syntax tree that nothing else of a Sandbox sees."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Each turn of a loop is paid for."""
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Joined with `~`."""
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Compared, or looked for."""
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "_compared")
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        """A literal."""
        self.generic_visit(node)
        return _filtered(node, "_built")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        """A literal."""
        self.generic_visit(node)
        return _filtered(node, "_built")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """A literal, unless it stands where values are assigned."""
        self.generic_visit(node)
        return _filtered(node, "_built") if node.ctx == "load" else node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class Generation(Extension):
    """{% generation %} marks an assistant's text for those who train. Here it means nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Its contents."""
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class TemplateNamespace(Namespace):
    """A namespace in which no name of Python's own machinery can be hidden, and that does not print what it holds."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise Refused(f"it stores {name} in a namespace; names may not begin with an underscore")


def _raise(message: object) -> None:
    raise Raised(str(message))


def _now(format: str) -> str:
    return datetime.now().strftime(format)
