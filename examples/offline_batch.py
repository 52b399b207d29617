"""Many prompts at once, each with parameters of its own; the results come in the prompts' order."""

from __future__ import annotations

from quire import LLM, SamplingParams

PROMPTS = {
    "import os\nimport ": SamplingParams(temperature=0.0, max_tokens=12),
    "class Queue:\n    def put(self, item": SamplingParams(temperature=0.6, max_tokens=40, seed=1),
    "for key, value in ": SamplingParams(temperature=0.6, max_tokens=30, stop="\n"),
    "def main() -> None:\n": SamplingParams(temperature=0.6, max_tokens=40, stop="\n\n"),
}


def main() -> None:
    """Run the batch and say of each result how it ended."""
    llm = LLM()
    for output in llm.generate(list(PROMPTS), list(PROMPTS.values())):
        sample = output.outputs[0]
        print(f"--- {len(sample.token_ids)} tokens, ended by {sample.finish_reason} {sample.stop_reason or ''}")
        print(f"{output.prompt}{sample.text}")


if __name__ == "__main__":
    main()
