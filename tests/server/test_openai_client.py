"""The openai package, as its users use it: sync, async, streaming, errors."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.server.serving import Serving, serving

MODEL = "quire-embedded"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(server: Serving) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_completions(client: OpenAI) -> None:
    given = {"model": MODEL, "prompt": "import ", "max_tokens": 6, "temperature": 0}
    answer = client.completions.create(**given, logprobs=2, echo=True)
    assert answer.choices[0].text.startswith("import ")
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    pieces = client.completions.create(**given, stream=True)
    assert "import " + "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text


def test_chat(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "a queue"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=8, seed=1, n=2, logprobs=True, top_logprobs=2
    )
    assert len(answer.choices) == 2
    assert answer.choices[0].logprobs is not None
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=8, seed=1, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_structured_output(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "a record"}],
        max_tokens=200,
        temperature=1,
        seed=2,
        response_format={"type": "json_schema", "json_schema": {"name": "record", "schema": SCHEMA, "strict": True}},
    )
    assert answer.choices[0].finish_reason == "stop"
    found = json.loads(answer.choices[0].message.content or "")
    assert set(found) == {"name", "size"}
    assert isinstance(found["size"], int)
    pieces = client.completions.create(
        model=MODEL, prompt="x = ", max_tokens=50, stream=True, extra_body={"regex": "[0-9]{3}-[a-f]{4}"}
    )
    text = "".join(piece.choices[0].text for piece in pieces)
    assert len(text) == 8
    assert text[3] == "-"


@pytest.mark.slow
def test_errors_are_those_of_the_package(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.completions.create(model=MODEL, prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    with serving(api_key=("right",)) as locked:
        base = f"{locked.url}/v1"
        with pytest.raises(openai.AuthenticationError):
            OpenAI(base_url=base, api_key="wrong", max_retries=0).models.list()
        assert list(OpenAI(base_url=base, api_key="right").models.list())


@pytest.mark.slow
def test_async(server: Serving) -> None:
    async def one(client: AsyncOpenAI, i: int) -> tuple[str, str]:
        given = {"model": MODEL, "prompt": f"x{i} = ", "max_tokens": 12, "temperature": 0}
        whole = await client.completions.create(**given)
        pieces = await client.completions.create(**given, stream=True)
        return whole.choices[0].text, "".join([piece.choices[0].text async for piece in pieces])

    async def run() -> list[tuple[str, str]]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            found = await asyncio.gather(*(one(client, i) for i in range(12)))
            stream = await client.completions.create(model=MODEL, prompt="y", max_tokens=400, stream=True)
            async for _ in stream:
                break
            await stream.close()  # leaves in the middle
            return found

    for whole, streamed in asyncio.run(run()):
        assert whole == streamed
        assert whole
