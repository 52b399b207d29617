"""Test an installed wheel without its sources: the native library loads, and a model generates tokens."""

from __future__ import annotations

import sys

from quire import LLM, SamplingParams, ops


def main() -> None:
    """Exit with an error message if a check fails."""
    if (reason := ops.unavailable("cpu")) is not None:
        sys.exit(f"the native kernels do not run: {reason}")
    [output] = LLM().generate("import os", SamplingParams(max_tokens=8, temperature=0.0))
    if len(output.outputs[0].token_ids) != 8:
        sys.exit(f"the embedded model did not answer: {output.outputs[0]}")
    print(f"{ops.load().name}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
