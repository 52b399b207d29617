"""Adapters as models of a server: named at the start, loaded and unloaded while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.config import parse_loras
from quire.errors import ConfigError
from quire.server.server_config import ServerConfig
from tests.models.adapters import embedded_linears, save_adapter
from tests.server.serving import SMALL, Serving, serving

pytestmark = pytest.mark.slow

COMPLETIONS, LOAD, UNLOAD = "/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = "def f(x):\n"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("abc"):
        save_adapter(directory / name, embedded_linears(), seed, spread=0.08)
    save_adapter(directory / "wide", embedded_linears(), r=9)
    return directory


@pytest.fixture(scope="module")
def loading(adapters: Path) -> Iterator[Serving]:
    """A server that begins with one adapter and lets clients load one more."""
    options = SMALL | {"max_loras": 2, "max_lora_rank": 8}
    with serving(options, lora=(f"a={adapters / 'a'}",), allow_lora_loading=True) as running:
        yield running


def text(server: Serving, model: str | None = None, path: str = COMPLETIONS) -> str:
    answer = server.post(path, model=model, prompt=PROMPT, max_tokens=16, temperature=0, ignore_eos=True)
    assert answer.status == 200, answer.body
    body = answer.json()
    assert body["model"] == (model or "quire-embedded")
    return str(body["choices"][0]["text"])


def test_adapters_are_models(loading: Serving, adapters: Path) -> None:
    """By name in every route, with what `LLM` gives; others are not there."""
    llm = LLM(lora={"a": adapters / "a"}, num_blocks=256)
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    for model in (None, "a"):
        [expected] = llm.generate(PROMPT, greedy, lora=model, use_tqdm=False)
        assert text(loading, model) == expected.outputs[0].text
    first, second = loading.ask("GET", "/v1/models").json()["data"]
    assert (first["id"], first["parent"]) == ("quire-embedded", None)
    assert (second["id"], second["parent"], second["root"]) == ("a", "quire-embedded", str(adapters / "a"))
    assert loading.ask("GET", "/v1/models/a").json() == second
    for model, lora in (("quire-embedded", None), ("a", "a")):
        body = loading.post("/v1/embeddings", model=model, input=PROMPT).json()
        [expected_vector] = llm.embed(PROMPT, lora=lora, use_tqdm=False)
        assert body["model"] == model
        assert body["data"][0]["embedding"] == pytest.approx(expected_vector.outputs.embedding)
        answer = loading.post(COMPLETIONS, model=model, prompt=PROMPT, max_tokens=4, use_beam_search=True, n=2).json()
        [search] = llm.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=4), lora=lora)
        assert [choice["text"] for choice in answer["choices"]] == [
            found.text.removeprefix(PROMPT) for found in search.sequences if found.text is not None
        ]
    error = loading.post(COMPLETIONS, model="b", prompt=PROMPT).error()
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"] == "there is no model 'b' here; this server has 'quire-embedded', 'a'"


def test_loading_and_unloading(loading: Serving, adapters: Path) -> None:
    """vLLM's bodies and answers; what cannot be is said, with the field."""
    llm = LLM(lora={name: adapters / name for name in "abc"}, num_blocks=256, max_loras=3)
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    [plain, a, b, c] = [one.outputs[0].text for one in llm.generate([PROMPT] * 4, greedy, lora=[None, "a", "b", "c"])]
    answer = loading.post(LOAD, lora_name="b", lora_path=str(adapters / "b"))
    assert (answer.status, answer.body) == (200, b"Success: LoRA adapter 'b' added successfully.")
    assert [text(loading), text(loading, "a"), text(loading, "b")] == [plain, a, b]
    for body, param, sentence in (
        ({"lora_name": "b", "lora_path": str(adapters / "c")}, "lora_name", "there is an adapter 'b' already"),
        ({"lora_name": "c", "lora_path": str(adapters / "c")}, "lora_name", "max_loras is 2"),
        ({"lora_name": "c", "lora_path": str(adapters / "wide")}, "lora_path", "has rank 9; max_lora_rank is 8"),
        ({"lora_name": "c", "lora_path": str(adapters)}, "lora_path", "is no PEFT adapter"),
        (
            {"lora_name": "c", "lora_path": "x" * 4_000},
            "lora_path",
            "it has no adapter_model.safetensors that can be read",
        ),
        ({"lora_name": "quire-embedded", "lora_path": "x"}, "lora_name", "the model's own name"),
        ({"lora_name": "", "lora_path": "x"}, "lora_name", "lora_name is ''"),
        ({"lora_name": "c"}, "lora_path", "lora_path is missing"),
    ):
        answer = loading.post(LOAD, **body)
        error = answer.error()
        assert (answer.status, error["param"]) == (400, param), error
        assert sentence in error["message"]
    messages = [
        loading.post(LOAD, lora_name="c", lora_path=str(path)).error()["message"].replace(str(path), "PATH")
        for path in (adapters, adapters / "none", adapters / "a" / "adapter_config.json")
    ]
    assert set(messages) == {"PATH is no PEFT adapter: it has no adapter_model.safetensors that can be read"}
    assert loading.post(LOAD, lora_name="b", lora_path=str(adapters / "c"), load_inplace=True).status == 200
    assert text(loading, "b") == c
    answer = loading.post(UNLOAD, lora_name="b")
    assert (answer.status, answer.body) == (200, b"Success: LoRA adapter 'b' removed successfully.")
    for answer in (loading.post(UNLOAD, lora_name="b"), loading.post(COMPLETIONS, model="b", prompt=PROMPT)):
        assert (answer.status, answer.error()["code"]) == (404, "model_not_found")
    assert text(loading, "a") == a


def test_nobody_loads_adapters_without_leave(server: Serving) -> None:
    assert server.post(LOAD, lora_name="a", lora_path="/").status == 404


def test_options() -> None:
    assert parse_loras(["a=b=c", "d=e"]) == {"a": "b=c", "d": "e"}
    for texts, sentence in ((["a"], "must be NAME=PATH"), (["=b"], "must be NAME=PATH"), (["a=b", "a=c"], "'a' twice")):
        with pytest.raises(ConfigError, match=sentence):
            ServerConfig(lora=tuple(texts))
    with pytest.raises(ConfigError, match="which is the model's own"):
        ServerConfig(lora=("m=x",), served_model_name=("m",))
    with pytest.raises(ConfigError, match="does not go with fleet_secret"):
        ServerConfig(allow_lora_loading=True, fleet_secret="s")
