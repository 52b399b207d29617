"""AsyncLLM: tasks of an event loop share one engine; leaving a loop over an answer cancels it."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from quire import AsyncLLM, SamplingParams

PROMPTS = ["import os\n", "class Stack:\n", "def main(argv):\n"]


async def follow(llm: AsyncLLM, prompt: str, log: list[str]) -> str:
    """Read one answer as it grows; `log` has the prompt once for each new piece."""
    text = ""
    async for output in llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=24)):
        text = output.outputs[0].text
        log.append(prompt)
    return text


async def first_line(llm: AsyncLLM, prompt: str) -> str:
    """Return the first line of an answer, and cancel the others."""
    answer = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=400))
    async for output in answer:
        line, end, _ = output.outputs[0].text.partition("\n")
        if end:
            break
    await answer.aclose()
    return line


async def main() -> None:
    """Follow three answers at the same time, then read one line of a fourth."""
    async with AsyncLLM() as llm:
        log: list[str] = []
        texts = await asyncio.gather(*(follow(llm, prompt, log) for prompt in PROMPTS))
        for prompt, text in zip(PROMPTS, texts, strict=True):
            print(f"--- {prompt}{text}")
        turns = sum(one != other for one, other in pairwise(log))
        print(f"--- computed together: {turns > len(PROMPTS)}")
        print(f"--- one line: {await first_line(llm, 'import ')!r}")


if __name__ == "__main__":
    asyncio.run(main())
