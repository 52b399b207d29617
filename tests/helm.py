"""What `helm template` makes of the chart, for machines without Helm: the few things that its templates use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
CHART = ROOT / "deploy" / "helm" / "quire"
# What stands ready in deploy/ for those who use no Helm: the chart with its own values, and with Ray.
READY: dict[str, dict[str, str]] = {
    "kubernetes/quire.yaml": {},
    "kuberay/quire.yaml": {"engine": "ray", "image": "quire-ray:0.1.0"},
}

ACTION = re.compile(r"(?:\s*\{\{-|\{\{)\s(.*?)\s(?:-\}\}\s*|\}\})", re.DOTALL)
WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')

Node = tuple[str, str, list[Any]]  # kind, argument, what is inside


def render(chart: Path, values: Mapping[str, Any], release: str) -> str:
    """All objects of a chart, a YAML document each. Raises ValueError for what is not understood."""
    return _Renderer(chart, values, release).objects()


class _Renderer:
    def __init__(self, chart: Path, values: Mapping[str, Any], release: str) -> None:
        self.dot = {"Values": values, "Release": {"Name": release}}
        self.parts: dict[str, list[Node]] = {}
        self.trees = []
        for path in sorted(chart.glob("templates/*")):
            tokens = _tokens(path.read_text())
            tree = _tree(tokens)
            self.parts |= {node[1].strip('"'): node[2] for node in tree if node[0] == "define"}
            if path.suffix == ".yaml":
                self.trees.append(tree)

    def objects(self) -> str:
        made = [self.text(tree, {}).strip() for tree in self.trees]
        return "\n---\n".join(text for text in made if text) + "\n"

    def text(self, tree: list[Node], names: Mapping[str, Any]) -> str:
        return "".join(self.node(node, names) for node in tree)

    def node(self, node: Node, names: Mapping[str, Any]) -> str:
        kind, argument, inside = node
        if kind == "text":
            return argument
        if kind == "define":
            return ""
        if kind == "if":
            return self.text(inside, names) if self.value(argument, names) else ""
        if kind == "range":
            found = re.fullmatch(r"(\$\w+), (\$\w+) := (.*)", argument)
            if found is None:
                raise ValueError(f"range {argument!r} is not understood")
            entries = sorted(self.value(found[3], names).items())
            return "".join(self.text(inside, {**names, found[1]: key, found[2]: value}) for key, value in entries)
        return str(self.value(argument, names))

    def value(self, pipe: str, names: Mapping[str, Any]) -> Any:
        """What a pipeline gives."""
        value: list[Any] = []
        for stage in pipe.split(" | "):
            name, *words = WORD.findall(stage)
            arguments = [self.word(word, names) for word in words] + value
            if name == "include":
                value = [self.text(self.parts[arguments[0]], names)]
            elif name == "nindent":
                indented = "\n".join(" " * arguments[0] + line for line in arguments[1].split("\n"))
                value = ["\n" + indented]
            elif name == "quote":
                escaped = str(arguments[0]).replace("\\", "\\\\").replace('"', '\\"')
                value = [f'"{escaped}"']
            elif name == "printf":
                value = [arguments[0] % tuple(arguments[1:])]
            elif name == "eq":
                value = [arguments[0] == arguments[1]]
            else:
                value = [self.word(name, names)]
        return value[0]

    def word(self, word: str, names: Mapping[str, Any]) -> Any:
        if word.startswith('"'):
            return word[1:-1]
        if word.isdecimal():
            return int(word)
        if word.startswith("$"):
            return names[word]
        if word == ".":
            return self.dot
        if not word.startswith("."):
            raise ValueError(f"{word!r} is not understood")
        found: Any = self.dot
        for part in word[1:].split("."):
            found = found[part]
        return found


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """Texts and actions in turn; `{{-` and `-}}` take the space next to them."""
    at = 0
    for match in ACTION.finditer(text):
        yield "text", text[at : match.start()]
        yield "action", match[1]
        at = match.end()
    yield "text", text[at:]


def _tree(tokens: Iterator[tuple[str, str]]) -> list[Node]:
    """Nodes up to the `end` that closes them."""
    found: list[Node] = []
    for kind, token in tokens:
        if kind == "text":
            found.append(("text", token, []))
            continue
        word, _, rest = token.partition(" ")
        if word == "end":
            return found
        if word in ("if", "range", "define"):
            found.append((word, rest, _tree(tokens)))
        elif word != "/*":
            found.append(("value", token, []))
    return found


def ready(name: str) -> str:
    """The text of a file in deploy/."""
    values = yaml.safe_load((CHART / "values.yaml").read_text()) | READY[name]
    head = "# Made from deploy/helm/quire by `python -m tests.helm`; docs/fleet.md says how to use it.\n"
    return head + render(CHART, values, "quire")


if __name__ == "__main__":
    for name in READY:
        path = ROOT / "deploy" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(ready(name))
