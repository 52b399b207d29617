"""Short names, and the list of recommended models: what is listed is served, needs what it says, and is found."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.cli import app
from quire.cli.models import HEAD, cost_of, described, needed_memory, recommended_costs
from quire.errors import ModelError
from quire.models import EMBEDDED, Own, choose, expected_weight_bytes, locate, read_config
from quire.models.decoder_config import weight_shapes
from quire.models.files import Described
from quire.models.gguf.architectures import ARCHITECTURES
from quire.models.hub import locate_description, pull
from quire.models.recommended import Recommended, find, recommended
from tests.models.fake_hub import fake_hub
from tests.models.gguf.writer import write_model
from tests.models.published import REPOSITORIES

ROOT = Path(__file__).parent.parent.parent
PUBLISHED = {name: raw for some in REPOSITORIES.values() for name, raw in some.items()}
# Those whose config.json is in published.py, whole, by the names of the repositories there.
SAME = {
    "smollm2:135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen3:0.6b": "Qwen/Qwen3-0.6B",
    "qwen3:8b": "Qwen/Qwen3-8B",
    "qwen3:30b": "Qwen/Qwen3-30B-A3B",
    "llama3.2:1b": "meta-llama/Llama-3.2-1B",
    "gemma3:1b": "google/gemma-3-1b-it",
    "phi4-mini:3.8b": "microsoft/Phi-4-mini-instruct",
    "gpt-oss:20b": "openai/gpt-oss-20b",
}


def count(config: Any) -> int:
    return sum(map(math.prod, weight_shapes(config).values()))


@pytest.mark.parametrize("model", recommended(), ids=lambda model: model.name)
def test_what_is_recommended_runs_on_the_own_decoder_and_has_its_size(model: Recommended) -> None:
    files = Described(model.name, model.config)
    assert isinstance(choose(files), Own)
    config, _ = read_config(files)
    if model.name in SAME:
        published, _ = read_config(Described("published", PUBLISHED[SAME[model.name]]))
        assert weight_shapes(config) == weight_shapes(published)
        assert config.groups == published.groups
    if model.file is None:
        assert model.download == pytest.approx(expected_weight_bytes(files).total, rel=1e-3)
        return
    kind = str(model.config["model_type"]).removesuffix("_text").replace("_", "")
    assert kind in ARCHITECTURES
    bits = 8 * model.download / count(config)
    low, high = {"Q8_0": (8.5, 8.6), "Q4_K_M": (4.8, 6.5)}[model.file.removesuffix(".gguf").rpartition("-")[2]]
    assert low < bits < high
    assert cost_of(model).weights.total == pytest.approx(model.download, rel=1e-6)


def test_needs_are_weights_and_a_cache_of_4096_tokens() -> None:
    """By hand, for two models: with full attention in fp32, and with windows in most layers."""
    found = {model.name: cost for model, cost in recommended_costs()}
    assert needed_memory(found["qwen3:0.6b"]) == pytest.approx(639_446_688 + 4096 * 28 * 2 * 8 * 128 * 4, abs=8)
    gpt_oss = 12 * (4096 + 128) * 2 * 8 * 64 * 2
    assert needed_memory(found["gpt-oss:20b"]) == found["gpt-oss:20b"].weights.total + gpt_oss
    memory = [needed_memory(cost) for cost in found.values()]
    assert memory == sorted(memory)
    assert found["qwen3:30b"].decode_rate(1e9) > 3 * found["gpt-oss:20b"].decode_rate(1e9) / 2  # 8 of 128 experts


def test_fits_is_a_table_of_whole_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.cost.measured_read_rate", lambda: 20e9)
    monkeypatch.setattr("quire.cache.sizing.free_memory", lambda: 4 * 2**30)
    lines = CliRunner().invoke(app, ["models", "--fits"]).stdout.splitlines()
    table, notes = lines[: lines.index("")], lines[lines.index("") + 1 :]
    assert table[0].split() == [*HEAD, "FITS", "TOKENS/S"]
    starts = [table[0].index(title) for title in table[0].split()]
    for line in table[1:]:
        assert all(line[at - 1] == " " and line[at] != " " for at in starts[1:]), line
    rows = {line.split()[0]: re.split(r"  +", line)[5:] for line in table[1:]}
    assert rows["qwen3:0.6b"] == ["yes", "31"]
    assert rows["qwen3:8b"] == ["no", "4.3"]
    assert "4.0 GiB are free here" in notes[0]
    records = json.loads(CliRunner().invoke(app, ["models", "--fits", "--json"]).stdout)
    assert {one["name"]: one["fits"] for one in records}["qwen3:8b"] is False
    assert find("qwen3:8b").file in {one["file"] for one in records}  # type: ignore[union-attr]


@pytest.mark.parametrize("page", ["README.md", "docs/get-started.md"])
def test_the_pages_show_the_list(page: str) -> None:
    table = f"| {' | '.join(HEAD).lower()} |\n|{'---|' * len(HEAD)}\n"
    for model, cost in recommended_costs():
        name, *others = described(model, cost)
        table += f"| `{name}` | {' | '.join(others)} |\n"
    assert table in (ROOT / page).read_text(), f"the table of {page} must be:\n{table}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A hub with two recommended models: random ones of these names. The working directory and the cache are empty."""
    small = {path.name: path.read_bytes() for path in EMBEDDED.iterdir() if path.is_file()}
    blocks = write_model(tmp_path / "model.gguf").read_bytes()
    repositories = {"HuggingFaceTB/SmolLM2-135M-Instruct": small, "Qwen/Qwen3-0.6B-GGUF": {
        "Qwen3-0.6B-Q8_0.gguf": blocks, "other-Q8_0.gguf": b"g"}, "qwen3": small}  # fmt: skip
    with fake_hub(repositories) as url:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        yield tmp_path


def test_a_short_name_is_announced_downloaded_once_and_answers(hub: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "quire")
    with LLM("qwen3:0.6b", num_blocks=16) as llm:
        [output] = llm.generate("hi", SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2
    said = "qwen3:0.6b is Qwen/Qwen3-0.6B-GGUF, Qwen3-0.6B-Q8_0.gguf: downloading 0.64 GB"
    assert caplog.messages.count(said) == 1
    path = locate("qwen3:0.6b")
    assert (path.name, path.parent.name) == ("Qwen3-0.6B-Q8_0.gguf", locate_description("qwen3:0.6b").parent.name)
    assert not (path.parent / "other-Q8_0.gguf").exists()
    assert caplog.messages.count(said) == 1
    shown = CliRunner().invoke(app, ["chat", "qwen3:0.6b", "hi", "--max-tokens", "2"])
    assert (shown.exit_code, bool(shown.stdout.strip())) == (0, True), shown.output
    removed = CliRunner().invoke(app, ["rm", "qwen3:0.6b", "--yes"])
    assert removed.stdout.startswith("removed Qwen/Qwen3-0.6B-GGUF (main), ")
    assert pull("smollm2:135m") == locate("SmolLM2:135M") == locate("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_a_path_and_a_repository_take_precedence(hub: Path) -> None:
    Path("qwen3:0.6b").mkdir()
    assert locate("qwen3:0.6b") == Path("qwen3:0.6b")
    Path("qwen3:0.6b").rmdir()
    assert locate("qwen3:0.6b").name == "Qwen3-0.6B-Q8_0.gguf"
    with pytest.raises(ModelError, match=r"there is no short name 'qwen3'; did you mean qwen3:0\.6b, qwen3:1\.7b"):
        locate("qwen3")
    link = hub / "hub" / "models--qwen3"
    link.symlink_to(locate("HuggingFaceTB/SmolLM2-135M-Instruct").parent.parent)
    assert locate("qwen3").is_relative_to(link)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3:0.7b", "there is no short name 'qwen3:0.7b'; did you mean qwen3:0.6b, qwen3:1.7b, qwen3:4b, qwen3:8b"),
        ("lama3.2:1b", "did you mean llama3.2:1b"),
        ("zzzz:9b", "there is no short name 'zzzz:9b'; `quire models --fits` lists the short names"),
        ("nofile.gguf", "there is no file 'nofile.gguf'"),
        ("./some/nofile.gguf", "there is no file './some/nofile.gguf'"),
        ("some/nofile.gguf", "'some/nofile.gguf' is not a file, and the hub has no such repository"),
    ],
)
def test_what_is_not_there_is_named(hub: Path, name: str, words: str) -> None:
    for arguments in (["serve", name, "--port", "0"], ["generate", "x", "--model", name]):
        shown = CliRunner().invoke(app, arguments)
        assert shown.exit_code == 1
        assert shown.stderr.startswith("error: ")
        assert words in shown.stderr
