"""Images over HTTP: all protocols, the answers of LLM.chat, and hostile bodies."""

from __future__ import annotations

import socket
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from quire import LLM, SamplingParams
from quire.server.http import image_fetcher
from quire.server.http.image_fetcher import ImageFetcher
from tests.models.image_checkpoints import pictures, save_images_model
from tests.server.hostile_images import case
from tests.server.serving import Serving, serving
from tests.server.web import PUBLIC, Resolver, Web, web

CHAT, GREEDY = "/v1/chat/completions", {"temperature": 0, "ignore_eos": True}


def encoded(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


PNG = encoded(pictures(1)[0])
DATA = b64encode(PNG).decode()
URL = f"data:image/png;base64,{DATA}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("smolvlm")
    save_images_model(directory, "smolvlm")
    return directory


@pytest.fixture(scope="module")
def eyes(checkpoint: Path) -> Iterator[Serving]:
    options = {"model": str(checkpoint), "dtype": "float32", "max_model_len": 512}
    with serving(options, ollama=True) as server:
        yield server


@pytest.fixture
def site(eyes: Serving, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    """A web of which a.example is allowed."""
    with web() as found:
        found.files["/a.png"] = PNG
        names = {"a.example": [PUBLIC], "private.example": ["127.0.0.1"], "turning.example": ["10.0.0.1", "::1"]}
        resolver = Resolver(names, found.port)
        monkeypatch.setattr(eyes.service, "fetcher", ImageFetcher(names, resolver))
        yield found
        resolver.end()


def asked(url: Any, text: str = "What is it?") -> list[dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    return [{"role": "user", "content": [image, {"type": "text", "text": text}]}]


def test_every_protocol_answers_as_llm_does(eyes: Serving, checkpoint: Path) -> None:
    with LLM(str(checkpoint), dtype="float32", max_model_len=512, num_blocks=64) as llm:
        messages: Any = asked(URL)
        [output] = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    text, count = output.outputs[0].text, len(output.prompt_token_ids)
    chat = eyes.post(CHAT, messages=messages, max_tokens=8, **GREEDY).json()
    assert chat["choices"][0]["message"]["content"] == text
    assert chat["usage"]["prompt_tokens"] == count
    content = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "What is it?"}]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 8, **GREEDY}
    answer = eyes.post("/v1/responses", **body).json()
    assert answer["output"][0]["content"][0]["text"] == text
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    anthropic = [{"role": "user", "content": content}]
    answer = eyes.post("/v1/messages", messages=anthropic, max_tokens=8, temperature=0).json()
    assert text.startswith(answer["content"][0]["text"])
    assert eyes.post("/v1/messages/count_tokens", messages=anthropic).json() == {"input_tokens": count}
    shared = {"model": "", "stream": False, "options": {"temperature": 0, "num_predict": 8}}
    message = {"role": "user", "content": "What is it?", "images": [DATA]}
    answer = eyes.post("/api/chat", messages=[message], **shared).json()
    assert text.startswith(answer["message"]["content"])
    assert answer["prompt_eval_count"] == count
    assert eyes.get("/props").json()["modalities"]["vision"]
    answer = eyes.post("/api/generate", prompt="What is it?", images=[DATA], **shared).json()
    assert text.startswith(answer["response"])
    assert answer["prompt_eval_count"] == count


def test_a_second_question_finds_the_image_in_the_cache(eyes: Serving) -> None:
    long = "It is a picture. " * 40
    for end in ("What?", "Why?"):
        usage = eyes.post(CHAT, messages=asked(URL, long + end), max_tokens=1, **GREEDY).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0.95 * usage["prompt_tokens"]


@pytest.mark.parametrize("url", ["/etc/passwd", "file:///etc/passwd", "http://127.0.0.1/a.png", "photo.png", ""])
def test_a_path_and_an_address_are_refused(eyes: Serving, url: str) -> None:
    error = eyes.post(CHAT, messages=asked(url), **GREEDY)
    assert error.status == 400
    assert "an image is given as a data URL" in error.error()["message"]
    assert error.error()["param"] == "messages"


def test_what_images_do_not_serve_is_refused(eyes: Serving) -> None:
    for own in ({"truncate_prompt_tokens": 4}, {"prompt_logprobs": 0}, {"use_beam_search": True, "n": 2}):
        answer = eyes.post(CHAT, messages=asked(URL), max_tokens=2, **own)
        assert answer.status == 400, (own, answer.body)
        assert "image" in answer.error()["message"], own
    answer = eyes.post("/api/generate", model="", prompt="a", images=[DATA], raw=True)
    assert answer.status == 400
    answer = eyes.post(CHAT, messages=asked(URL, "a " * 2000))
    assert (answer.status, answer.error()["code"]) == (400, "context_length_exceeded")


def test_an_address_of_an_allowed_host_is_fetched_by_every_protocol(eyes: Serving, site: Web) -> None:
    address = "http://a.example/a.png"
    count = eyes.post(CHAT, messages=asked(URL), max_tokens=1, **GREEDY).json()["usage"]["prompt_tokens"]
    found = eyes.post(CHAT, messages=asked(address), max_tokens=1, **GREEDY).json()
    assert found["usage"]["prompt_tokens"] == count
    content = [{"type": "input_image", "image_url": address}, {"type": "input_text", "text": "What is it?"}]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 1, **GREEDY}
    assert eyes.post("/v1/responses", **body).json()["usage"]["input_tokens"] == count
    content = [{"type": "image", "source": {"type": "url", "url": address}}, {"type": "text", "text": "What is it?"}]
    anthropic = [{"role": "user", "content": content}]
    assert eyes.post("/v1/messages/count_tokens", messages=anthropic).json() == {"input_tokens": count}
    assert site.hosts == ["a.example"] * 3


def test_other_addresses_are_refused_with_their_place(eyes: Serving, site: Web) -> None:
    for url, reason in (
        (
            "http://evil.example/a.png",
            "messages[0].content[0]: the URL 'http://evil.example/a.png' of an image has the",
        ),
        ("/etc/passwd", "must begin with data:, http:// or https://"),
        ("http://private.example/a.png", "its host has no public address"),
    ):
        answer = eyes.post(CHAT, messages=asked(url), **GREEDY)
        assert (answer.status, answer.error()["param"]) == (400, "messages")
        assert reason in answer.error()["message"]
    parts = [{"type": "image_url", "image_url": {"url": "http://a.example/a.png"}}] * 65
    many = eyes.post(CHAT, messages=[{"role": "user", "content": parts}], **GREEDY)
    assert "a prompt has 65 images; it may have at most 64" in many.error()["message"]
    assert site.hosts == []


def test_hostile_images_are_refused_and_the_server_serves_on(
    eyes: Serving, site: Web, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    """Of no case the server fails, and none leads it to another host or to this machine."""
    monkeypatch.setattr(image_fetcher, "MAX_SECONDS", 0.3)
    resolver = eyes.service.fetcher._resolver  # type: ignore[union-attr]
    found: Counter[int] = Counter()
    with socket.create_server(("127.0.0.1", 0)) as forbidden, ThreadPoolExecutor(4) as pool:
        port = forbidden.getsockname()[1]

        def ask(seed: int) -> None:
            answer = eyes.post(CHAT, messages=asked(case(seed, site, port)), max_tokens=1, **GREEDY)
            found[answer.status] += 1
            assert answer.status in (200, 400), (seed, answer.body)
            assert answer.status == 200 or answer.error()["param"] == "messages", (seed, answer.body)

        for _ in pool.map(ask, range(10_000 if long else 200)):
            pass
        forbidden.setblocking(False)
        with pytest.raises(BlockingIOError):
            forbidden.accept()
    print(f"answers by status: {dict(found)}; requests to the allowed host: {len(site.hosts)}")
    assert set(site.hosts) == {"a.example"}
    assert set(resolver.asked) <= {"a.example", "private.example", "turning.example"}
    assert set(resolver.used) == {PUBLIC}
    assert found[400] > found[200] > 0
    assert eyes.post(CHAT, messages=asked(URL), max_tokens=1, **GREEDY).status == 200
    assert eyes.is_idle()
