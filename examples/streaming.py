"""Text as it comes: print a continuation token by token, and stop early with nothing left over."""

from __future__ import annotations

from quire import LLM, SamplingParams

PROMPT = "def parse(line):\n"


def main() -> None:
    """Stream one prompt to its end, then another one only until its third line."""
    llm = LLM()
    shown = 0
    print(PROMPT, end="")
    for output in llm.stream(PROMPT, SamplingParams(temperature=0.6, max_tokens=60)):
        text = output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)

    print("\n--- the first three lines")
    stream = llm.stream(PROMPT, SamplingParams(temperature=0.6, max_tokens=200, seed=4))
    for output in stream:
        text = output.outputs[0].text
        if text.count("\n") >= 3:
            break
    stream.close()  # takes the request back: its blocks are free again
    print(PROMPT + "\n".join(text.split("\n")[:3]))
    print(f"--- blocks in use afterwards: {llm.engine.scheduler.usage().used_blocks}")


if __name__ == "__main__":
    main()
