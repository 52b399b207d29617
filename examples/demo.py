"""What `make demo` runs: the embedded model continues some Python, and a table says what that took."""

from __future__ import annotations

import time

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from quire import LLM, SamplingParams

PROMPTS = [
    "class Node:\n    def __init__(self",
    'def basename(path):\n    """Return',
    "class Version:\n    def __lt__(self, other):",
    "class Reader:\n    def __enter__(self):",
]
# The penalty keeps this small model from repeating lines. A definition ends with two empty lines.
PARAMS = SamplingParams(max_tokens=64, temperature=0.0, repetition_penalty=1.15, stop=["\n\n\n"])


def main() -> None:
    """Continue the prompts side by side and print texts and figures."""
    llm = LLM()
    usage = llm.engine.scheduler.usage
    outputs, fullest = {}, usage()
    start = time.perf_counter()
    for output in llm.stream(PROMPTS, PARAMS):
        outputs[output.request_id] = output
        fullest = max(fullest, usage(), key=lambda u: u.used_blocks)
    seconds = time.perf_counter() - start

    console = Console(highlight=False)
    for output in outputs.values():
        console.print(Rule(style="dim"))
        console.print(Text(output.prompt or "", style="bold") + Text(output.outputs[0].text))
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs.values())
    new_tokens = sum(len(output.outputs[0].token_ids) for output in outputs.values())
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in (
        ("tokens", f"{prompt_tokens} read, {new_tokens} written"),
        ("seconds", f"{seconds:.2f}"),
        ("tokens/s", f"{new_tokens / seconds:.1f}"),
        ("blocks used", f"{fullest.used_blocks} of {fullest.num_blocks} at the fullest moment"),
        (
            "memory wasted",
            f"{fullest.wasted_slots} of {fullest.used_slots} slots ({fullest.wasted_slots / fullest.used_slots:.1%}), "
            "in partly filled blocks",
        ),
    ):
        table.add_row(name, value)
    console.print(Rule(style="dim"))
    console.print(table)


if __name__ == "__main__":
    main()
