"""What is told: of texts, in pieces; of a model that cannot be loaded; of requests, in the log and in errors."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError, QuireError
from quire.models import EMBEDDED
from quire.server.protocol.completions import CompletionRequest
from quire.server.run import build_parts
from quire.server.server_config import ServerConfig
from tests.marks import of_long_runs
from tests.server.fuzz import LONGEST_MESSAGE
from tests.server.serving import Serving, serving
from tests.server.test_pitfalls import CHAT, COMPLETIONS, assert_serves, raw

# ------------------------------------------------ characters of several tokens, split or crashed on: vllm#19449

FORCED = ["(é|漢|字){6}", "(🎉|🦊b|👍🏽){4}", "(👩‍👩‍👧|🇨🇿|ạ̈|ก็){3}"]


@pytest.mark.slow
@pytest.mark.parametrize("regex", FORCED)
def test_streams_and_answers_are_the_same_text(server: Serving, regex: str) -> None:
    for body in (
        {"max_tokens": 5},  # ends within a character
        {"max_tokens": 60, "n": 3, "logprobs": 2},
        {"max_tokens": 60, "stop": ["🎉", "字", "ñ", "👧"]},
        {"max_tokens": 60, "echo": True, "prompt": "# 漢字 🎉 "},
    ):
        given = {"prompt": "# ", "regex": regex, "temperature": 1.0, "seed": 5} | body
        whole = server.post(COMPLETIONS, **given).json()
        pieces = [c for chunk in server.post(COMPLETIONS, **given, stream=True).events() for c in chunk["choices"]]
        for choice in whole["choices"]:
            mine = [c for c in pieces if c["index"] == choice["index"]]
            assert "".join(c["text"] for c in mine) == choice["text"]
            assert not any("\ufffd" in c["text"] for c in mine[:-1])
            if choice["logprobs"] is not None:
                tokens = [token for c in mine for token in c["logprobs"]["tokens"]]
                assert tokens == choice["logprobs"]["tokens"]


@pytest.mark.slow
def test_any_tokens_at_all_are_a_text(server: Serving) -> None:
    size = server.service.engine_client.engine.vocab_size
    for start in range(0, size, 256):
        tokens = list(range(start, min(start + 256, size)))
        assert isinstance(server.post("/detokenize", tokens=tokens).json()["prompt"], str)
        body = {"prompt": tokens, "max_tokens": 8, "temperature": 2.0, "seed": start, "logprobs": 3, "echo": True}
        whole = server.post(COMPLETIONS, **body).json()["choices"][0]
        pieces = [chunk["choices"][0] for chunk in server.post(COMPLETIONS, **body, stream=True).events()]
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert_serves(server)


# --------------------------------------- "Engine core initialization failed": vllm#17618, vllm#19002


def copied(directory: Path, name: str = "", content: bytes | None = None) -> str:
    """The embedded model, with one file that is other, or missing."""
    shutil.copytree(EMBEDDED, directory / "model")
    if name and content is None:
        (directory / "model" / name).unlink()
    elif content is not None:
        (directory / "model" / name).write_bytes(content)
    return str(directory / "model")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", None, "config.json"),
        ("config.json", b"{", "config.json"),
        of_long_runs("config.json", b"[]", "config.json"),
        ("config.json", b'{"model_type": "abacus"}', "abacus"),
        ("model.safetensors", None, "safetensors"),
        of_long_runs("model.safetensors", b"", "model.safetensors"),
        of_long_runs("model.safetensors", b"\xff" * 1000, "model.safetensors"),
        ("model.safetensors", "cut", "model.safetensors"),
        ("tokenizer.json", b"{}", "tokenizer"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json"),
    ],
)
def test_a_model_that_cannot_be_loaded_ends_in_a_sentence(
    tmp_path: Path, name: str, content: bytes | str | None, words: str
) -> None:
    if content == "cut":
        content = (Path(EMBEDDED) / name).read_bytes()[:100_000]
    assert not isinstance(content, str)
    assert_told({"model": copied(tmp_path, name, content)}, words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "/no/such/model"}, "/no/such/model"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"kv_cache_memory": "1KiB"}, "kv_cache_memory"),
        ({"num_blocks": 2**40}, "num_blocks"),
        ({"kv_cache_memory": "900%"}, "kv_cache_memory"),
        ({"device": "abacus"}, "abacus"),
        ({"dtype": "float1"}, "float1"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": 10**9}, "max_model_len"),
        ({"attention_backend": "abacus"}, "abacus"),
    ],
)
def test_options_that_cannot_be_end_in_a_sentence(options: dict[str, Any], words: str) -> None:
    assert_told(options, words)


def assert_told(options: dict[str, Any], words: str) -> None:
    with pytest.raises(QuireError) as caught:
        build_parts(options, ServerConfig())
    shown = str(caught.value)
    assert words in shown
    assert "\n" not in shown
    assert 10 < len(shown) < 500


def test_keys_that_cannot_be_sent_are_refused() -> None:
    with pytest.raises(ConfigError, match="printable ASCII"), serving(api_key=("with\nnewline",)):
        pass


# ------------------------------------------------------------------------------------------------ logs and echoes

SPOKEN = "end\n2026-01-01 ERROR all is lost\r\x1b[2J\x9b2J\x00\x7f\u2028\u2029\x85\u202e"


@pytest.mark.slow
def test_nothing_a_client_says_begins_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with serving(enable_log_requests=True) as server:
        server.post(COMPLETIONS, prompt=SPOKEN, max_tokens=1, user=SPOKEN, metadata={SPOKEN: [SPOKEN, "\ud800"]})
        server.post(CHAT, messages=[{"role": SPOKEN, "content": SPOKEN, "name": SPOKEN}], max_tokens=1)
        assert raw(server, COMPLETIONS, "metadata", '{"a": NaN, "\\ud800": 1e999}').status == 200
        server.post(COMPLETIONS, prompt=SPOKEN, max_tokens=SPOKEN)
        server.get("/v1/models/%0a%1b%5b2J")
        server.post(COMPLETIONS + "%0aERROR", prompt="a")
    mine = [record.getMessage() for record in caplog.records if record.name.startswith(("quire", "uvicorn"))]
    assert sum("all is lost" in line for line in mine) == 2
    assert all(line.isascii() and line.isprintable() for line in mine), mine


@pytest.mark.slow
def test_errors_repeat_little_of_a_request_and_nothing_of_another(server: Serving) -> None:
    long = "".join(chr(97 + i * i % 26) for i in range(5000))
    server.post(COMPLETIONS, prompt="my secret prompt", max_tokens=1, user="my secret name")
    bodies: list[dict[str, Any]] = [{name: long} for name in (*CompletionRequest.model_fields, long)]
    bodies += [{name: [long]} for name in CompletionRequest.model_fields] + [{long: {long: long}}]
    bodies += [{"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": long, long: 1}}}}]
    bodies += [
        {"response_format": {"type": long}},
        {"stream_options": {long: 1}},
        {"stop_token_ids": [2000 + i for i in range(256)]},
    ]
    bodies += [{"regex": "(" + long}, {"grammar": "start: /" + long}, {"use_beam_search": True, "stop": long[:200]}]
    answers = [server.post(COMPLETIONS, **{"prompt": "a", "max_tokens": 1} | body) for body in bodies]
    answers += [server.get(f"/v1/models/{long}"), server.get(f"/{long}"), server.ask("POST", f"/version?{long}", b"")]
    answers += [server.ask("POST", COMPLETIONS, long.encode(), {"Content-Type": long})]
    for answer in answers:
        if answer.status == 200:
            continue
        assert 400 <= answer.status < 500
        error = json.dumps(answer.error())
        assert len(answer.error()["message"]) <= LONGEST_MESSAGE
        assert not any(error[i : i + 101] in long for i in range(max(0, len(error) - 100))), error
        assert "secret" not in error
