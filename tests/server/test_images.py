"""Images over HTTP: all protocols, the answers of LLM.chat, and hostile bodies."""

from __future__ import annotations

import random
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from quire import LLM, SamplingParams
from quire.sandbox.images import MAX_PIXELS
from quire.server.http.image_fetcher import ImageFetcher
from tests.models.image_checkpoints import pictures, save_images_model
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
        resolver = Resolver({"a.example": [PUBLIC], "private.example": ["127.0.0.1"]}, found.port)
        monkeypatch.setattr(eyes.service, "fetcher", ImageFetcher(["a.example", "private.example"], resolver))
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


def test_hostile_images_are_refused_and_the_server_serves_on(eyes: Serving) -> None:
    draw = random.Random(0)
    bomb = encoded(Image.new("1", (2**13, MAX_PIXELS // 2**13 + 1)))
    urls: list[Any] = [None, 1, [], {}, "data:", "data:,", "data:;base64,", "data:image/png;base64,é", "data:\0"]
    urls += [URL[: draw.randrange(30, len(URL) // 2)] for _ in range(60)]
    for _ in range(100):
        kind = draw.choice([b"%PDF-1.4\n" + PNG, b"GIF89a" + PNG, b"<svg/>" + PNG, b"\xff\xd8\xff" + PNG, PNG[:9000]])
        urls.append("data:image/png;base64," + b64encode(kind[: draw.randrange(20, 6000)]).decode())
    urls += [f"data:image/png;base64,{DATA[:i]}!{DATA[i:]}" for i in range(30)]
    urls += [f"data:image/png;base64,{b64encode(bomb).decode()}"]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda url: eyes.post(CHAT, messages=asked(url), max_tokens=1, **GREEDY), urls))
    assert len(found) == 200
    assert {answer.status for answer in found} == {400}
    assert {answer.error()["param"] for answer in found} == {"messages"}
    assert eyes.post(CHAT, messages=asked(URL), max_tokens=1, **GREEDY).status == 200
    assert eyes.is_idle()
