"""What each sampling parameter does to the same prompt."""

from __future__ import annotations

from quire import LLM, SamplingParams

PROMPT = '"""Return the '
TOUR = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.5": SamplingParams(temperature=0.5, seed=0),
    "temperature 1.5": SamplingParams(temperature=1.5, seed=0),
    "top_k 3": SamplingParams(top_k=3, seed=0),
    "top_p 0.5": SamplingParams(top_p=0.5, seed=0),
    "min_p 0.2": SamplingParams(min_p=0.2, seed=0),
    "greedy, repetition_penalty 1.3": SamplingParams(temperature=0.0, repetition_penalty=1.3),
    "greedy, frequency_penalty 1": SamplingParams(temperature=0.0, frequency_penalty=1.0),
}


def main() -> None:
    """Print a continuation for each, three samples of one seed, and the candidates for one token."""
    llm = LLM()
    for name, params in TOUR.items():
        [output] = llm.generate(PROMPT, params)
        print(f"{name:32s} {output.outputs[0].text!r}")

    print("--- three samples of one seed, the same ones every time")
    [output] = llm.generate(PROMPT, SamplingParams(n=3, seed=7, max_tokens=8))
    for sample in output.outputs:
        print(f"{sample.index}: {sample.text!r}")

    print("--- the five most probable tokens after 'import '")
    [output] = llm.generate("import ", SamplingParams(temperature=0.0, max_tokens=1, logprobs=5))
    for candidate in (output.outputs[0].logprobs or [{}])[0].values():
        print(f"{candidate.rank}: {candidate.decoded_token!r:12} logprob {candidate.logprob:.2f}")


if __name__ == "__main__":
    main()
