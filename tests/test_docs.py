"""Every command and every piece of Python in the documents runs, and the documents name all that is public."""

import inspect
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

import quire
from quire import LLM, SamplingParams, ops
from quire.cli import app
from quire.models.hub import EMBEDDED, pull
from quire.ops import native
from tests.forks import Process, Spawner
from tests.models.fake_hub import fake_hub
from tests.models.gguf.writer import write_model
from tests.models.image_checkpoints import pictures, save_images_model
from tests.server.test_serve_command import running
from tools import performance_page

ROOT = Path(__file__).parent.parent
# tests/server/test_serving_page.py and tests/fleet/test_fleet_page.py run what is in these.
SERVED = ("serving.md", "fleet.md")
WALKTHROUGHS = ROOT / "docs" / "develop"  # test_walkthroughs.py
DOCUMENTS = [
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "tests" / "README.md")
    if path.name not in SERVED and path.parent != WALKTHROUGHS
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SEEING = "HuggingFaceTB/SmolVLM-256M-Instruct"  # a small random model takes its place
ADDRESS = "http://127.0.0.1:8000"  # of the server that a document speaks of


def blocks(language: str) -> list[tuple[str, str]]:
    found = [
        (path.name, body) for path in DOCUMENTS for kind, body in BLOCK.findall(path.read_text()) if kind == language
    ]
    return [(f"{name}-{i}", body) for i, (name, body) in enumerate(found)]


COMMANDS = [(name, line[2:]) for name, body in blocks("console") for line in body.splitlines() if line.startswith("$ ")]
# As `quire generate` with the same option, and as a chat with others.
AGAIN = (".venv/bin/quire serve --tensor-parallel-size 2", ".venv/bin/quire chat")
# Their own tests run these, on less: bench/tests and tests/simulate.
MEASURES = re.compile(r"\.venv/bin/quire (bench (?!.* --help$)|simulate --fleet ).*")


def once(commands: list[tuple[str, str]]) -> list[Any]:
    """Parameters: each command where it is shown first. Those that measure, or show the same, run with --long."""
    first = {command: name for name, command in reversed(commands)}
    late = {command for command in first if command in AGAIN or MEASURES.fullmatch(command)}
    return [
        pytest.param(command, id=f"{name}: {command}", marks=[pytest.mark.long] * (command in late))
        for command, name in first.items()
    ]


@pytest.fixture(scope="module")
def server(forks: Spawner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """What `quire serve` starts, at a port of its own."""
    with running(forks, "--data-dir", str(tmp_path_factory.mktemp("data"))) as found:
        yield found


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model.gguf that documents speak of."""
    return write_model(tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.fixture
def hub(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub with the repositories that documents speak of, and a cache that has one of them."""
    repositories = {
        "Qwen/Qwen3-0.6B": {path.name: path.read_bytes() for path in EMBEDDED.iterdir() if path.is_file()},
        "Qwen/Qwen3-0.6B-GGUF": {"Qwen3-0.6B-Q8_0.gguf": gguf_file.read_bytes()},
    }
    with fake_hub(repositories) as url:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        pull("Qwen/Qwen3-0.6B")
        yield


@pytest.fixture(scope="module")
def kv_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory kv-blocks that documents speak of; there are blocks of a prompt in it."""
    path = tmp_path_factory.mktemp("kv") / "kv-blocks"
    with LLM(num_blocks=50, kv_disk=path) as llm:
        llm.generate([[*range(100, 150)]], SamplingParams(max_tokens=1))
    return path


@pytest.fixture(scope="module")
def receipts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The receipts.jsonl that documents speak of; there are receipts in it."""
    path = tmp_path_factory.mktemp("receipts") / "receipts.jsonl"
    with LLM(num_blocks=50, receipts=path) as llm:
        llm.generate(["import "] * 3, SamplingParams(max_tokens=2))
    return path


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reads images, with a photo."""
    directory = tmp_path_factory.mktemp("seeing")
    save_images_model(directory, "smolvlm")
    pictures(1)[0].save(directory / "photo.png")
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("command", once(COMMANDS))
def test_command(command: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    if command == ".venv/bin/quire serve":
        assert request.getfixturevalue("server").url
        return
    piped, _, last = command.rpartition(" | ")
    program, *arguments = shlex.split(last.removeprefix(".venv/bin/"))
    if arguments[0] in ("chat", "run"):  # what a user would type, to get a short answer
        piped = piped.removeprefix("echo ") or "a stack"
        arguments += [] if "--max-tokens" in arguments else ["--max-tokens", "8"]
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))  # of who asks for completion
    if arguments[0] in ("pull", "list", "rm") or "qwen3:0.6b" in arguments:
        request.getfixturevalue("hub")
    if arguments[0] in ("top", "ps") or "--url" in arguments:
        url = request.getfixturevalue("server").url
        arguments = [word.replace(ADDRESS, url) for word in arguments]
        arguments += ["--url", url] if url not in arguments else []
    if "model.gguf" in arguments:
        path = str(request.getfixturevalue("gguf_file"))
        arguments = [path if word == "model.gguf" else word for word in arguments]
    if "kv-blocks" in arguments:
        path = str(request.getfixturevalue("kv_blocks"))
        arguments = [path if word == "kv-blocks" else word for word in arguments]
    if arguments[0] == "batch":  # where its results may be
        monkeypatch.chdir(request.getfixturevalue("tmp_path"))
        arguments[1] = str(ROOT / arguments[1])
    if "receipts.jsonl" in arguments:
        path = str(request.getfixturevalue("receipts"))
        arguments = [path if word == "receipts.jsonl" else word for word in arguments]
    if arguments[0] == "serve":
        with running(request.getfixturevalue("forks"), *arguments[1:]) as process:
            assert process.url
        return
    if program == "make":  # these tests run inside one of them: ask what would be done
        if shutil.which("make") is None:
            pytest.skip("this machine has no make")
        assert subprocess.check_output(["make", "--dry-run", *arguments])
        return
    if program == "curl":
        if shutil.which("curl") is None:
            pytest.skip("this machine has no curl")
        url = request.getfixturevalue("server").url
        answer = subprocess.check_output(command.replace(ADDRESS, url), shell=True, text=True, timeout=120)
        assert answer
        assert '"error"' not in answer
        return
    assert program == "quire"
    result = CliRunner().invoke(app, arguments, input=piped, prog_name="quire")
    assert result.exit_code == 0, result.output
    assert result.stdout


def test_what_measures_has_the_options_that_are_shown() -> None:
    for command in filter(MEASURES.fullmatch, (command for _, command in COMMANDS)):
        _, *words = shlex.split(command)
        options = {word for word in words if word.startswith("--")}
        described = CliRunner().invoke(app, [*words[: 1 + (words[0] == "bench")], "--help"])
        assert described.exit_code == 0, command
        assert options <= set(re.findall(r"--[\w-]+", described.stdout)), command


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
@pytest.mark.slow
def test_python(path: Path, request: pytest.FixtureRequest) -> None:
    """A page's pieces of Python, from top to bottom."""
    names: dict[str, object] = {"__name__": "document"}
    text = path.read_text()
    for match in BLOCK.finditer(text):
        if match[1] == "python":
            code = match[2]
            if SEEING in code:
                directory = request.getfixturevalue("seeing")
                code = code.replace(SEEING, str(directory)).replace("photo.png", str(directory / "photo.png"))
            if ADDRESS in code:
                code = code.replace(ADDRESS, request.getfixturevalue("server").url)
            above = text[: match.start()].count("\n") + 1
            exec(compile("\n" * above + code, path.name, "exec"), names)


def consoles(page: Path) -> list[tuple[str, str]]:
    return [each for each in BLOCK.findall(page.read_text()) if each[0] == "console"]


# A command of a console block with the lines below it, which are what it prints.
TRANSCRIPT = re.compile(r"^\$ \.venv/bin/(quire .*)\n((?:(?!\$ |```).*\n)+)", re.MULTILINE)
TRANSCRIPTS = [
    (command, shown)
    for page in (ROOT / "README.md", ROOT / "docs" / "get-started.md")
    for _, body in consoles(page)
    for command, shown in TRANSCRIPT.findall(body)
]
BACKENDS = ["reference"] if native.unavailable() else [*native.runnable(native.library_path()), "reference"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("command", "shown"), TRANSCRIPTS, ids=[command[:40] for command, _ in TRANSCRIPTS])
def test_what_a_page_shows_is_what_comes_out(
    command: str, shown: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every instruction set of this machine, and on the reference: a reader has another machine than the writer."""
    if backend == "reference":
        monkeypatch.setattr(native, "unavailable", lambda: "this is about the reference")
        monkeypatch.delitem(ops.BACKENDS, "triton")  # whose interpreter serves a CPU in tests
    else:
        loaded = native.load(backend)
        monkeypatch.setattr(native, "default", lambda: loaded)
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert result.stdout == shown


def test_transcripts_are_found() -> None:
    """One that nobody compares would not be noticed: all lines of output in these pages belong to one."""
    assert {command.split()[1] for command, _ in TRANSCRIPTS} == {"generate", "--version"}
    for page in (ROOT / "README.md", ROOT / "docs" / "get-started.md"):
        found = sum(shown.count("\n") for _, body in consoles(page) for _, shown in TRANSCRIPT.findall(body))
        assert found == sum(not line.startswith("$ ") for _, body in consoles(page) for line in body.splitlines())


def readme() -> str:
    return (ROOT / "README.md").read_text()


def test_the_readme_is_short() -> None:
    assert len(readme().splitlines()) <= 160


def test_every_figure_of_the_readme_is_of_the_page() -> None:
    """The table's numbers are those of docs/performance.md, as they are written there."""
    page = (ROOT / "docs" / "performance.md").read_text()
    table = re.search(r"^\| measured \|.*?\n\n", readme(), re.MULTILINE | re.DOTALL)
    assert table
    rows = table[0].strip().splitlines()[2:]
    assert len(rows) == 6
    for row in rows:
        found = row.split("|")[2]
        numbers = re.findall(r"\d[\d,.]*\d|\d", found)
        assert numbers, row
        assert all(number in page for number in numbers), row


def test_the_front_page_compares_by_measured_figures() -> None:
    """Every number of its table is in a saved measurement of that engine, on the machine and the day that it names."""
    page = (ROOT / "docs" / "index.md").read_text()
    table = re.search(r"^\| engine \|.*?\n\n", page, re.MULTILINE | re.DOTALL)
    assert table
    peers, transformers = (performance_page.read(name) for name in ("peers-zen5", "transformers-zen5"))
    assert peers["date"] == transformers["date"]
    assert peers["date"] in page
    assert all("2 cores" in found["machine"] and "Zen 5" in found["machine"] for found in (peers, transformers))
    rows = [row.split("|")[1:-1] for row in table[0].strip().splitlines()[2:]]
    assert len(rows) == 5
    for engine, *claims in rows:
        measured = {"Quire", "vLLM-CPU" if engine.strip() == "vLLM" else engine.strip().partition(",")[0]}
        source = transformers["rows"] if "transformers" in measured else peers["rows"]
        cells = str([row for row in source if source is transformers["rows"] or row[1] in measured])
        for number in re.findall(r"\d+\.\d+", " ".join(claims)):
            assert re.search(rf"\b{number}\b", cells), (engine, number)


def test_the_page_of_figures_is_made_of_the_results() -> None:
    """And is short; each result has a command, a date and a machine, whether the page shows it or not."""
    page = performance_page.page()
    assert performance_page.PAGE.read_text() == page, "run python tools/performance_page.py"
    assert len(page.splitlines()) <= 150
    names = [path.stem for path in performance_page.RESULTS.glob("*.json")]
    assert len(names) > 10
    for name in names:
        found = performance_page.read(name)
        assert all(found[key] for key in ("title", "date", "machine")), name
        assert found["command"] or "command" in found["columns"], name
        assert all(len(row) == len(found["columns"]) for row in found["rows"]), name


def public(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Each public class and function of a module, and the methods and properties of the classes."""
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isclass(thing) or inspect.isfunction(thing) or inspect.ismodule(thing):
            yield f"{module.__name__}.{name}", thing
        if inspect.isclass(thing):
            for key, member in vars(thing).items():
                if not key.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                    yield f"{module.__name__}.{name}.{key}", member


@pytest.mark.parametrize("module", [quire, ops], ids=lambda module: module.__name__)
def test_every_public_name_has_a_docstring(module: ModuleType) -> None:
    found = dict(public(module))
    assert len(found) > 10
    assert not [name for name, thing in found.items() if not (thing.__doc__ or "").strip()]


def test_every_public_operator_has_its_place_on_the_page() -> None:
    page = (ROOT / "docs" / "operators.md").read_text()
    shown = "".join(body for kind, body in BLOCK.findall(page) if kind == "python")
    for name in ops.__all__:
        if callable(getattr(ops, name)) and name not in (
            "AttentionPlan",
            "Limits",
            "Backend",
            "PagedPrefillInfo",
            "RecurrentPlan",
        ):
            made = (f"{name}(", f"{name}.create(", f"{name}.allocate(")
            assert any(call in shown for call in made), f"no example calls {name}"
        assert f"`{name}`" in page or name in shown, f"docs/operators.md does not name {name}"
    inner = {
        "compile",
        "linears",
        "swap",
        "experts",
        "choose",
        "batch_invariant",
        "set_prefetch",
        "exchange",
        "chain",
        "exchange_bytes",
    }  # for models, caches, options
    for name, _ in inspect.getmembers(ops.Backend, inspect.isfunction):
        assert name.startswith("_") or name in inner or f"{name}(" in shown, f"no example calls {name}"


def test_the_lineage_names_tests_that_exist() -> None:
    page, named, path = (ROOT / "docs" / "lineage.md").read_text(), 0, None
    for reference in re.findall(r"`([a-z_/]*\.py(?:::\w+)?|::test_\w+)`", page):
        file, _, name = reference.partition("::")
        folder = ROOT if file.startswith("bench/") else ROOT / "tests"
        if file and not (folder / file).exists():  # a file of the library
            assert (ROOT / file).exists() or (ROOT / "src" / "quire" / "ops" / file).exists(), reference
            continue
        path = folder / file if file else path
        assert not name or f"def {name}(" in path.read_text(), f"{path} has no {name}"
        named += 1
    assert named > 60
