"""Regular expressions from files of strangers, matched in bounded time.

Adapters and checkpoints name modules by regular expressions. Python's `re` tries one way to match after the other, and
for some expressions there are exponentially many. It is asked where there can only be a few. For other expressions all
ways are followed at once, as in Thompson (1968): a set of positions in the name goes through the expression, one bit
for each position. Steps of both are counted.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable
from typing import Any

from quire.errors import ModelError
from quire.models.hf_config import shown

IS_NEW = sys.version_info >= (3, 11)
parser: Any = importlib.import_module("re._parser" if IS_NEW else "sre_parse")
ops: Any = importlib.import_module("re._constants" if IS_NEW else "sre_constants")  # of a parsed pattern's nodes

MOST_STEPS = 2**22  # for all patterns of a file and all names: some seconds
LONGEST, DEEPEST = 2**14, 40  # characters of a pattern, and groups within one another
LONGEST_NAME = 2**8  # that `re` is asked about
FEW = 2**17  # ways to match such a name
WAYS_A_STEP = 2**16  # of `re`, in the time of a step here
CATEGORIES = {
    ops.CATEGORY_DIGIT: re.compile(r"\d"),
    ops.CATEGORY_NOT_DIGIT: re.compile(r"\D"),
    ops.CATEGORY_SPACE: re.compile(r"\s"),
    ops.CATEGORY_NOT_SPACE: re.compile(r"\S"),
    ops.CATEGORY_WORD: re.compile(r"\w"),
    ops.CATEGORY_NOT_WORD: re.compile(r"\W"),
}
CHARACTERS = (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN)
REPEATS = (ops.MAX_REPEAT, ops.MIN_REPEAT)  # which differ in what they try first
ASSERTIONS = (ops.ASSERT, ops.ASSERT_NOT)


class Patterns:
    """The patterns of one file, which share the steps that they may take."""

    def __init__(self, where: str) -> None:
        """where: the file or its part, for errors."""
        self.where = where
        self._left = MOST_STEPS

    def compiled(self, key: str, text: str, prefix: str = "", suffix: str = "") -> Pattern:
        """Return a pattern between a prefix and a suffix.

        Args:
            key: Where it stands in the file.
            text: A regular expression as `re` has it, without references to groups, flags, and atomic groups.
            prefix: A regular expression that comes before it.
            suffix: One that comes after it.

        Raises:
            ModelError: It is none, or none that is served.
        """
        place = f"{self.where}: {key} has {shown(text)}"
        if len(text) > LONGEST:
            raise ModelError(f"{place}, a pattern of {len(text)} characters; it must have at most {LONGEST}")
        try:
            parser.parse(text)
            tree = parser.parse(f"{prefix}{text}{suffix}")
        except (re.error, OverflowError, RecursionError) as error:
            raise ModelError(f"{place}, which is no pattern: {error}") from error
        if tree.state.flags & ~re.UNICODE:
            raise ModelError(f"{place}, a pattern with flags; these are not served")
        ways = _ways(tree, place, 0)
        return Pattern(self, tree, re.compile(f"{prefix}{text}{suffix}") if ways <= FEW else None, ways)

    def spend(self, steps: int) -> None:
        """Count steps. Raises ModelError when there were too many."""
        self._left -= steps
        if self._left < 0:
            raise ModelError(
                f"{self.where}: its patterns take more than {MOST_STEPS} steps to match; give names instead"
            )


class Pattern:
    """A regular expression."""

    def __init__(self, patterns: Patterns, tree: Any, usual: re.Pattern[str] | None, ways: int) -> None:
        self._patterns, self._tree, self._usual, self._ways = patterns, tree, usual, ways

    def begins(self, name: str) -> bool:
        """Return whether a name begins with what the pattern matches, as `re.match` does.

        Raises ModelError when the patterns of its file have taken too many steps.
        """
        if self._usual is not None and len(name) <= LONGEST_NAME:
            self._patterns.spend(1 + self._ways // WAYS_A_STEP)
            return self._usual.match(name) is not None
        return _Name(name, self._patterns).after(self._tree, 1) != 0


class _Name:
    """A name that is matched. Bit i of a set says that position i, before character i, is in it."""

    def __init__(self, text: str, patterns: Patterns) -> None:
        self._size, self._patterns = len(text), patterns
        self._cost = 1 + self._size // 512  # steps on longer sets take longer
        self._at: dict[str, int] = {}  # character -> its positions
        for i, character in enumerate(text):
            self._at[character] = self._at.get(character, 0) | 1 << i
        patterns.spend(self._size)

    def after(self, nodes: Iterable[tuple[Any, Any]], positions: int) -> int:
        """Return where a match of these nodes may end that begins at one of the positions."""
        for op, argument in nodes:
            if not positions:
                return 0
            self._patterns.spend(self._cost)
            positions = self._after_one(op, argument, positions)
        return positions

    def _after_one(self, op: Any, argument: Any, positions: int) -> int:
        if op in CHARACTERS:
            return (positions & self._accepted(op, argument)) << 1
        if op in REPEATS:
            least, most, nodes = argument
            return self._after_repeat(least, most, nodes, positions)
        if op in ASSERTIONS:
            direction, nodes = argument
            true = sum(1 << i for i in _members(positions) if self._is_true(direction, nodes, i))
            return true if op == ops.ASSERT else positions & ~true
        if op == ops.AT:
            return positions & self._anchor(argument)
        if op == ops.SUBPATTERN:
            return self.after(argument[-1], positions)
        found = 0  # of a branch
        for nodes in argument[1]:
            found |= self.after(nodes, positions)
        return found

    def _after_repeat(self, least: int, most: int, nodes: Any, positions: int) -> int:
        if most == ops.MAXREPEAT and len(nodes) == 1 and nodes[0][0] in CHARACTERS:
            if least:
                positions = self._after_repeat(least, least, nodes, positions)
            accepted = self._accepted(*nodes[0])
            # The carry of the sum runs through each row of accepted characters, to the position after it.
            return positions | ((positions & accepted) + accepted) ^ accepted
        found = 0 if least else positions
        for count in range(1, most + 1):
            before, positions = positions, self.after(nodes, positions)
            if count >= least or positions == before:
                found |= positions
            if positions in (0, before):
                break
        return found

    def _is_true(self, direction: int, nodes: Any, position: int) -> bool:
        """Whether an assertion holds there. direction: 1 of what follows, -1 of what is before."""
        if direction == 1:
            return self.after(nodes, 1 << position) != 0
        width = nodes.getwidth()[0]
        return position >= width and self.after(nodes, 1 << position - width) >> position & 1 == 1

    def _anchor(self, kind: Any) -> int:
        """The positions where an anchor holds."""
        end = 1 << self._size
        if kind in (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING):
            return 1
        if kind == ops.AT_END_STRING:
            return end
        if kind == ops.AT_END:
            return end | self._at.get("\n", 0) & end >> 1
        word = self._accepted(ops.IN, [(ops.CATEGORY, ops.CATEGORY_WORD)])
        boundaries = word ^ word << 1
        return boundaries if kind == ops.AT_BOUNDARY else 2 * end - 1 & ~boundaries

    def _accepted(self, op: Any, argument: Any) -> int:
        """The positions of the characters that a node accepts."""
        if op == ops.LITERAL:
            return self._at.get(chr(argument), 0)
        self._patterns.spend(len(self._at))
        return sum(at for character, at in self._at.items() if _accepts(op, argument, character))


def _accepts(op: Any, argument: Any, character: str) -> bool:
    if op == ops.LITERAL:
        return bool(ord(character) == argument)
    if op == ops.NOT_LITERAL:
        return bool(ord(character) != argument)
    if op == ops.ANY:
        return character != "\n"
    if op == ops.RANGE:
        return bool(argument[0] <= ord(character) <= argument[1])
    if op == ops.CATEGORY:
        return CATEGORIES[argument].match(character) is not None
    negated = argument[0][0] == ops.NEGATE
    return any(_accepts(kind, inner, character) for kind, inner in argument[negated:]) != bool(negated)


def _members(positions: int) -> Iterable[int]:
    while positions:
        lowest = positions & -positions
        yield lowest.bit_length() - 1
        positions ^= lowest


def _ways(nodes: Iterable[tuple[Any, Any]], place: str, depth: int) -> int:
    """Return in how many ways nodes may match a name of LONGEST_NAME characters, at most, or more than FEW.

    Raises ModelError for a node that is not served, or is within too many others.
    """
    if depth > DEEPEST:
        raise ModelError(f"{place}, a pattern with more than {DEEPEST} groups within one another")
    ways = 1
    for op, argument in nodes:
        if op in REPEATS:
            least, most, inner = argument
            own = _ways(inner, place, depth + 1)
            is_simple = own == 1 and len(inner) == 1 and inner[0][0] in CHARACTERS
            own = min(most - least + 1, LONGEST_NAME) if is_simple else own + 1 if most == 1 else FEW + 1
        elif op in ASSERTIONS or (op == ops.SUBPATTERN and not (argument[1] or argument[2])):
            own = _ways(argument[-1], place, depth + 1)
        elif op == ops.BRANCH:
            own = sum(_ways(branch, place, depth + 1) for branch in argument[1])
        elif op in (*CHARACTERS, ops.AT):
            own = 1
        else:
            raise ModelError(f"{place}, a pattern with {str(op).lower()}, which is not served; name modules without it")
        ways = min(ways * own, FEW + 1)
    return ways
