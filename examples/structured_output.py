"""Structured output: the text follows a JSON schema, a regular expression or a list of choices."""

from __future__ import annotations

import json

from quire import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["class", "function", "module"]},
        "lines": {"type": "integer", "minimum": 1, "maximum": 999},
    },
    "required": ["name", "kind", "lines"],
    "additionalProperties": False,
}


def main() -> None:
    """Ask for a record, a version and one of three words, in one batch."""
    llm = LLM()
    prompts = ["# The record of a definition:\n", "__version__ = ", "Python is a language that is "]
    forms = [
        StructuredOutputsParams(json=SCHEMA),
        StructuredOutputsParams(regex=r"[0-9]\.[0-9]{1,2}\.[0-9]"),
        StructuredOutputsParams(choice=["compiled", "interpreted", "drawn"]),
    ]
    params = [SamplingParams(max_tokens=64, seed=0, structured_outputs=form) for form in forms]
    record, version, word = (output.outputs[0].text for output in llm.generate(prompts, params))

    print(f"record: {json.loads(record)}")
    print(f"version: {version}")
    print(f"word: {word}")


if __name__ == "__main__":
    main()
