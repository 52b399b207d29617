"""What `helm template` makes of the chart, for machines without Helm: the few things that its templates use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parent.parent
CHART = ROOT / "deploy" / "helm" / "quire"
# What stands ready in deploy/ for those who use no Helm: the chart with its own values, with Ray, and its objects for
# Prometheus's operator. The values that differ, and which of the templates.
READY: dict[str, tuple[dict[str, Any], str]] = {
    "kubernetes/quire.yaml": ({}, "*"),
    "kubernetes/monitoring.yaml": ({"monitoring": {"enabled": True, "labels": {}, "interval": "15s"}}, "monitoring.*"),
    "kuberay/quire.yaml": ({"engine": "ray", "image": "quire-ray:0.1.0"}, "*"),
}

ACTION = re.compile(r"(?:\s*\{\{-|\{\{)\s(.*?)\s(?:-\}\}\s*|\}\})", re.DOTALL)
WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')


class Node(NamedTuple):
    """A part of a template."""

    kind: str
    argument: str = ""
    inside: tuple[Node, ...] = ()
    otherwise: tuple[Node, ...] = ()  # after `else`


def render(chart: Path, values: Mapping[str, Any], release: str, templates: str = "*") -> str:
    """All objects of a chart, a YAML document each. Raises ValueError for what is not understood."""
    return _Renderer(chart, values, release, templates).objects()


class _Renderer:
    def __init__(self, chart: Path, values: Mapping[str, Any], release: str, templates: str) -> None:
        self.names = {".": {"Values": values, "Release": {"Name": release}}}
        self.chart = chart
        self.parts: dict[str, tuple[Node, ...]] = {}
        self.trees = []
        for path in sorted(chart.glob("templates/*")):
            tree, _ = _tree(_tokens(path.read_text()))
            self.parts |= {node.argument.strip('"'): node.inside for node in tree if node.kind == "define"}
            if path.suffix == ".yaml" and path.match(templates):
                self.trees.append(tree)

    def objects(self) -> str:
        made = [self.text(tree, self.names).strip() for tree in self.trees]
        lines = "\n---\n".join(text for text in made if text).splitlines()
        return "".join(f"{line.rstrip()}\n" for line in lines if line.strip())

    def text(self, tree: tuple[Node, ...], names: Mapping[str, Any]) -> str:
        return "".join(self.node(node, names) for node in tree)

    def node(self, node: Node, names: Mapping[str, Any]) -> str:
        if node.kind == "text":
            return node.argument
        if node.kind == "define":
            return ""
        if node.kind == "if":
            return self.text(node.inside if self.value(node.argument, names) else node.otherwise, names)
        if node.kind == "with":
            value = self.value(node.argument, names)
            return self.text(node.inside, {**names, ".": value}) if value else ""
        if node.kind == "range":
            found = re.fullmatch(r"(?:(\$\w+), )?(\$\w+) := (.*)", node.argument)
            if found is None:
                raise ValueError(f"range {node.argument!r} is not understood")
            over = self.value(found[3], names)
            entries = sorted(over.items()) if isinstance(over, dict) else enumerate(over)
            return "".join(self.text(node.inside, {**names, found[1]: key, found[2]: one}) for key, one in entries)
        return str(self.value(node.argument, names))

    def value(self, pipe: str, names: Mapping[str, Any]) -> Any:
        """What a pipeline gives."""
        value: list[Any] = []
        for stage in pipe.split(" | "):
            name, *words = WORD.findall(stage)
            arguments = [self.word(word, names) for word in words] + value
            if name == "include":
                value = [self.text(self.parts[arguments[0]], {".": arguments[1]})]
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
            elif name == "kindIs":
                value = [arguments[0] == ("slice" if isinstance(arguments[1], list) else "string")]
            elif name == "toYaml":
                value = [yaml.safe_dump(arguments[0], default_flow_style=False).rstrip()]
            elif name == "toJson":
                value = [json.dumps(arguments[0])]
            elif name == ".Files.Get":
                value = [(self.chart / arguments[0]).read_text()]
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
        if not word.startswith("."):
            raise ValueError(f"{word!r} is not understood")
        *path, last = word[1:].split(".")
        found: Any = names["."]
        for part in path:
            found = found[part]
        return found.get(last) if last else found


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """Texts and actions in turn; `{{-` and `-}}` take the space next to them."""
    at = 0
    for match in ACTION.finditer(text):
        yield "text", text[at : match.start()]
        yield "action", match[1]
        at = match.end()
    yield "text", text[at:]


def _tree(tokens: Iterator[tuple[str, str]]) -> tuple[tuple[Node, ...], str]:
    """Nodes up to the `end` or `else` that closes them, and which of the two it is."""
    found: list[Node] = []
    for kind, token in tokens:
        if kind == "text":
            found.append(Node("text", token))
            continue
        word, _, rest = token.partition(" ")
        if word in ("end", "else"):
            return tuple(found), word
        if word in ("if", "with", "range", "define"):
            inside, closed = _tree(tokens)
            otherwise = _tree(tokens)[0] if closed == "else" else ()
            found.append(Node(word, rest, inside, otherwise))
        elif word != "/*":
            found.append(Node("value", token))
    return tuple(found), ""


def ready(name: str) -> str:
    """The text of a file in deploy/."""
    own, templates = READY[name]
    values = yaml.safe_load((CHART / "values.yaml").read_text()) | own
    head = "# Made from deploy/helm/quire by `python -m tests.helm`; docs/fleet-ray.md says how to use it.\n"
    return head + render(CHART, values, "quire", templates)


# ------------------------------------------------------------------------------------------------- with other values

Object = dict[str, Any]
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
PLACED: Object = {
    "podAnnotations": {"example.org/owner": "us"},
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}},
}
VARIANTS: dict[str, Object] = {
    "plain": {},
    "plain, other values": {
        "image": "registry.example.org/quire:1",
        "secretName": "other",
        "port": 8080,
        "imagePullSecrets": [{"name": "registry"}],
        "hfTokenSecretName": "hub",
        "options": {"model": "a/b", "max-num-seqs": "64", "kv-cache-memory": "4GiB", "lora": ["x=/x", 'y="/y z"']},
        "replicas": VALUES["replicas"]
        | {"count": 5, "cpu": 16, "gpu": "nvidia.com/gpu", "existingClaim": "models"}
        | {"extraEnv": [{"name": "QUIRE_DTYPE", "value": "bfloat16"}]}
        | PLACED,
        "gateways": VALUES["gateways"]
        | {"keysSecretName": "keys", "extraEnv": [{"name": "QUIRE_ACCESS_LOG", "value": "false"}]}
        | PLACED,
        "serviceAnnotations": {"a": "b"},
        "ingress": {"host": "llm.example.org", "className": "nginx", "annotations": {"a": "b"}, "tlsSecretName": "tls"},
        "monitoring": VALUES["monitoring"] | {"enabled": True, "labels": {"release": "prometheus"}},
    },
    "ray": {"engine": "ray"},
    "ray, other values": {
        "engine": "ray",
        "secretName": "other",
        "hfTokenSecretName": "hub",
        "options": {"model": "a/b", "max-num-seqs": "64", "lora": ["x=/x", "y=/y"]},
        "replicas": VALUES["replicas"] | {"count": 3, "maxCount": 3, "existingClaim": "models"} | PLACED,
        "gateways": VALUES["gateways"] | PLACED,
        "monitoring": VALUES["monitoring"] | {"enabled": True},
        "head": VALUES["head"] | PLACED | {"redisAddress": "redis:6379", "redisSecretName": "redis"},
    },
}


def objects_of(variant: str) -> list[Object]:
    release = "quire" if "other" not in variant else "mine"
    return list(yaml.safe_load_all(render(CHART, VALUES | VARIANTS[variant], release)))


def pods(objects: list[Object]) -> Iterator[Object]:
    """All pod templates."""
    for each in objects:
        if each["kind"] in ("StatefulSet", "Deployment"):
            yield each["spec"]["template"]
        elif each["kind"] == "RayService":
            cluster = each["spec"]["rayClusterConfig"]
            yield cluster["headGroupSpec"]["template"]
            yield from (group["template"] for group in cluster["workerGroupSpecs"])


if __name__ == "__main__":
    for name in READY:
        path = ROOT / "deploy" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(ready(name))
