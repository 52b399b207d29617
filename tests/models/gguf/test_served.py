"""A GGUF file is a model by itself: offline, on the command line, as a server, and out of a repository."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.cli import app
from quire.errors import ModelError
from quire.sandbox import process
from tests import warm
from tests.forks import Spawner
from tests.models.checkpoints import save
from tests.models.gguf.writer import write_gguf, write_model
from tests.server.test_serve_command import running

PROMPT = [{"role": "user", "content": "import os"}]
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module", autouse=True)
def _warm() -> Iterator[None]:
    """Processes of sandboxes start in no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", warm.Warm())
        yield


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.fixture(scope="module")
def expected(gguf_file: Path) -> str:
    """What the model answers, offline."""
    with LLM(str(gguf_file), num_blocks=16) as llm:
        [output] = llm.chat(PROMPT, GREEDY)
        assert llm.get_tokenizer().decode(output.prompt_token_ids).endswith("import os:")
    assert len(output.outputs[0].token_ids) == GREEDY.max_tokens
    return output.outputs[0].text


@pytest.mark.slow
def test_a_server_answers_as_the_file_does_offline(gguf_file: Path, expected: str, forks: Spawner) -> None:
    body = {"messages": PROMPT, "temperature": 0, "max_tokens": GREEDY.max_tokens}
    with running(forks, str(gguf_file), "--num-blocks", "16") as server:
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize("word", ["none", "no_vocab"])
def test_a_file_without_a_vocabulary_takes_tokens(tmp_path: Path, word: str) -> None:
    save(tmp_path, "Llama")
    write_gguf(tmp_path, tmp_path / "model.gguf", "Llama", **{"tokenizer.ggml.model": word})
    with LLM(str(tmp_path / "model.gguf"), num_blocks=16) as llm:
        assert len(llm.generate([[3, 5, 7]], GREEDY)[0].outputs[0].token_ids) == GREEDY.max_tokens


@pytest.mark.slow
def test_a_file_of_a_repository(
    gguf_file: Path, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the layout of the hub's cache, and as a directory."""
    repository = tmp_path / "models--someone--small-GGUF"
    snapshot = repository / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    (snapshot / "small-Q8_0.gguf").symlink_to(gguf_file)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for place in ("someone/small-GGUF", str(snapshot)):
        with LLM(place, gguf_file="small-Q8_0.gguf", num_blocks=16) as llm:
            assert llm.chat(PROMPT, GREEDY)[0].outputs[0].text == expected
    for place in ("someone/small-GGUF", str(snapshot)):
        shown = CliRunner().invoke(app, ["info", "--model", place, "--gguf-file", "small-Q8_0.gguf"])
        assert shown.exit_code == 0, shown.output
        assert "gguf Q8_0" in shown.stdout
    with pytest.raises(ModelError, match=r"has no 'other\.gguf'; of its GGUF files there are here: small"):
        LLM(str(snapshot), gguf_file="other.gguf")
    with pytest.raises(ModelError, match="is a file already; leave one of them out"):
        LLM(str(gguf_file), gguf_file="small-Q8_0.gguf")
