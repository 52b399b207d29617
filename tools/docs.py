"""A hook of mkdocs: fills in the parts of the documents that are generated from the code. They are not committed.

A page requests a part with a comment on a separate line, such as `<!-- made: command line -->`. The pages of HTTP and
metrics are generated from the descriptions of a running server of the embedded model.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer.main

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "quire"
PLACE = re.compile(r"^<!-- made: (.*?) -->$", re.MULTILINE)
# Documents at the root -> their pages below docs/develop.
AT_ROOT = {
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changes.md",
    "tests/README.md": "tests.md",
}


def on_config(config: Any) -> None:
    """Leave out the list of versions unless mike builds the site: only its branch has versions.json."""
    if "MIKE_DOCS_VERSION" not in os.environ:
        config.extra.pop("version", None)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the parts of a page. mkdocs calls this for each page. Raises LookupError for an unknown part."""

    def part(match: re.Match[str]) -> str:
        what, _, argument = match[1].partition(": ")
        if what not in PARTS:
            raise LookupError(f"no part {what!r}; there are: {', '.join(PARTS)}")
        return PARTS[what](argument) if argument else PARTS[what]()

    return PLACE.sub(part, markdown)


def root_file(name: str) -> str:
    """Return a document of the root, with links relative to docs/develop."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for path, page in AT_ROOT.items():
        text = re.sub(rf"\]\((\.\./)?{re.escape(path)}", f"]({page}", text)
    return re.sub(r"\]\((\.\./)?docs/(develop/)?", lambda match: "](" if match[2] else "](../", text)


# ------------------------------------------------------------------------------------------------ the Python


def tree() -> str:
    """Return tables of all modules, each with the first line of its docstring."""
    lines = []
    for path in sorted(SRC.rglob("*.py"), key=lambda path: (path.parent.parts, path.name != "__init__.py", path.name)):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        place = path.relative_to(SRC.parent)
        if path.name == "__init__.py":
            level = len(place.parts) - 1
            title = ".".join(place.parts[:-1])
            lines.append(f"\n{'#' * (level + 2)} {title}\n\n{docstring.splitlines()[0] if docstring else ''}\n")
            lines.append("| module | |\n|---|---|")
        elif docstring:
            lines.append(f"| `{path.stem}` | {escaped(docstring.splitlines()[0])} |")
    return "\n".join(lines)


def api(module: str) -> str:
    """Return directives for mkdocstrings, one for each public name of a module."""
    names = {"quire": _names(SRC / "__init__.py"), "quire.ops": _names(SRC / "ops" / "__init__.py")}[module]
    shown = [name for name in names if name not in {"__version__", "ops", "BACKENDS"}]
    return "\n\n".join(f"::: {module}.{name}" for name in shown)


def _names(path: Path) -> list[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise LookupError(f"{path} has no __all__")


# ------------------------------------------------------------------------------------------ the command line


def command_line() -> str:
    """Return tables of all commands with their options, from the parser."""
    from quire.cli import app

    return "\n".join(_command("quire", typer.main.get_command(app), 2))


def _command(name: str, command: Any, level: int) -> Iterator[str]:
    yield f"{'#' * level} {name}\n\n{escaped(command.help or '')}\n"
    if below := getattr(command, "commands", None):
        for key, each in below.items():
            yield from _command(f"{name} {key}", each, level + (level < 3))
        return
    rows = []
    for each in command.params:
        if each.name == "help":
            continue
        names = ", ".join(f"`{option}`" for option in (*each.opts, *each.secondary_opts))
        if each.param_type_name == "argument":
            names = f"`{each.name.upper()}`"
        default = "" if each.default in (None, False, ()) or callable(each.default) else f"`{each.default}`"
        rows.append(f"| {names} | {escaped(getattr(each, 'help', None) or '')} | {default} |")
    if rows:
        yield "\n".join(["| option | | default |", "|---|---|---|", *rows]) + "\n"


def vllm_arguments() -> str:
    """Return a table of the arguments of vLLM's engine that Quire does not have, from the one that decides on them."""
    from quire.config import FOREIGN

    lines = ["| argument | accepted | meaning, and why others are refused |", "|---|---|---|"]
    for name, foreign in sorted(FOREIGN.items()):
        accepted = [f"`{value!r}`" for value in foreign.harmless if value is not None]
        accepted += [] if foreign.others is None else [foreign.others.description]
        lines.append(f"| `{name}` | {', '.join(accepted) or '`None`'} | {escaped(foreign.sentence)} |")
    return "\n".join(lines)


# --------------------------------------------------------------------------------------- HTTP and the metrics


@cache
def served() -> tuple[dict[str, Any], str]:
    """Start a server of the embedded model. Return its OpenAPI document, and its metrics after one answer."""
    data = tempfile.TemporaryDirectory()
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--num-blocks", "64", "--fleet-secret", "s"]
    command += ["--data-dir", data.name]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        first = server.stdout.readline()
        match = re.search(r"http://\S+", first)
        if match is None:
            raise RuntimeError(f"the server did not start: {first}{server.stdout.read()}")

        def get(path: str, body: bytes | None = None) -> str:
            request = urllib.request.Request(match[0] + path, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                return str(answer.read().decode())

        get("/v1/completions", b'{"prompt": "import", "max_tokens": 2}')
        return json.loads(get("/openapi.json")), get("/metrics")
    finally:
        server.terminate()
        server.wait(30)
        data.cleanup()


def http() -> str:
    """Return a description of each route, with the fields of its requests and responses."""
    document, _ = served()
    schemas, lines = document["components"]["schemas"], []
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            lines.append(f"## {method.upper()} {path}\n\n{route.get('description') or route['summary']}\n")
            if body := route.get("requestBody"):
                for kind, content in body["content"].items():
                    fields = "`, `".join(content["schema"].get("properties", ()))
                    lines.append(
                        f"Takes a form ({kind}) with `{fields}`.\n"
                        if fields
                        else f"Takes {_type(content['schema'])}.\n"
                    )
            for status, answer in route["responses"].items():
                kinds = [_type(one["schema"]) for one in answer.get("content", {}).values() if "schema" in one]
                streams = " Streams events." if "text/event-stream" in answer.get("content", {}) else ""
                lines.append(
                    f"- **{status}**: {answer['description']}{': ' if kinds else ''}{', '.join(kinds)}.{streams}"
                )
            lines.append("")
    lines.append("## Objects\n")
    for name, schema in sorted(schemas.items()):
        lines.append(f"### {name}\n\n{escaped(schema.get('description', ''))}\n")
        if properties := schema.get("properties"):
            lines.append("| field | type | default | |\n|---|---|---|---|")
            for field, each in properties.items():
                default = f"`{json.dumps(each['default'])}`" if "default" in each else ""
                needed = "required" if field in schema.get("required", ()) and not default else default
                lines.append(f"| `{field}` | {_type(each)} | {needed} | {escaped(each.get('description', ''))} |")
            lines.append("")
    return "\n".join(lines)


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_type(each) for each in schema[key]))
    if schema.get("type") == "array":
        most = f", at most {schema['maxItems']:,}" if "maxItems" in schema else ""
        return f"list of {_type(schema.get('items', {}))}{most}"
    bounds = [f"{schema[key]:g}" for key in ("minimum", "maximum") if key in schema]
    length = f", at most {schema['maxLength']:,} characters" if "maxLength" in schema else ""
    return str(schema.get("type", "any")) + (f" {' to '.join(bounds)}" if len(bounds) == 2 else "") + length


def metrics() -> str:
    """Return a table of a server's metrics."""
    _, scraped = served()
    return _families(scraped)


def fleet_metrics() -> str:
    """Return a table of a gateway's metrics."""
    from quire.fleet.metrics import FleetMetrics
    from quire.fleet.score import Candidate, Demand, choose
    from quire.fleet.state import ReplicaState
    from quire.fleet.view import ReplicaView, Status

    state = ReplicaState(
        waiting_tokens=0, num_waiting=0, num_running=0, max_running=1, free_blocks=1, cached_blocks=0, num_blocks=1,
        block_size=16, seconds_a_step=0.0, seconds_a_prompt_token=0.0, seconds_a_sequence=0.0, draining=False,
    )  # fmt: skip
    one = Candidate(slot=0, name="", fingerprint="", state=state, step_age=0.0, num_blocks=0, unseen_tokens=0,
                    unseen_requests=0)  # fmt: skip
    view = ReplicaView(url="", status=Status.UP, failure=None, fingerprint=None, different=(), state=state,
                       held_blocks=0, num_samples=0)  # fmt: skip
    found = FleetMetrics()
    found.show(lambda: [view])
    found.routed("", choose(Demand(request_id="", num_tokens=1, new_tokens=1.0, hit_rate=0.0), [one]))
    found.count("resumed", "")  # metrics with labels appear only with a sample
    found.count("contradictions", "")
    found.count("left_out", "")
    found.count("lost", "")
    found.count("refused", 503)
    return _families(found.render("")[0].decode())


def _families(scraped: str) -> str:
    """Return a table of scraped metrics."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", scraped, re.MULTILINE))
    found = re.findall(r"^# HELP (\S+) (.*)$", scraped, re.MULTILINE)
    families = [(name, text) for name, text in found if not name.endswith("_created")]  # the time when a count began
    labels = {
        name: dict.fromkeys(
            label
            for sample in re.findall(rf"^{name}(?:_bucket|_total)?\{{(.*)\}} ", scraped, re.MULTILINE)
            for label in re.findall(r"(\w+)=", sample)
        )
        for name, _ in families
    }
    # A gateway's histogram has no labels except those of its buckets.
    own = [set(found) - {"le"} for name, found in labels.items() if ":" in name and found]
    common = set.intersection(*own)
    lines = []
    if common:
        lines = [f"All of Quire's own have the labels {' and '.join(f'`{label}`' for label in sorted(common))}.\n"]
    lines += ["| metric | kind | |", "|---|---|---|"]
    for name, text in sorted(families, key=lambda family: ":" not in family[0]):  # Quire's own first
        others = ", ".join(label for label in labels[name] if label not in common | {"le"})
        lines.append(f"| `{name}` | {kinds[name]} | {escaped(text)}{f' By {others}.' if others else ''} |")
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Escape a text for a cell of a table."""
    return " ".join(text.replace("|", "\\|").replace("[", "\\[").replace("<", "&lt;").split())


PARTS: dict[str, Callable[..., str]] = {
    "tree": tree,
    "api": api,
    "command line": command_line,
    "arguments of vllm": vllm_arguments,
    "http": http,
    "metrics": metrics,
    "fleet metrics": fleet_metrics,
    "file": root_file,
}
