"""Test the clients lm_eval and guidellm against `quire serve`, with the commands of their users.

`python tools/check_clients.py [DIRECTORY [PYTHON]]` installs them into the virtual environment DIRECTORY, which is
.venv-clients by default. PYTHON is the Python of an environment with vLLM, which takes gigabytes; then
`vllm bench serve` is run as well. The results of lm_eval are compared with those of `quire.LLM` for the same texts.
Everything is local: no model, data set or tokenizer is downloaded.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from quire import LLM, SamplingParams
from quire.sandbox.chat_template import ChatTemplate
from quire_bench.server.process import server

ROOT = Path(__file__).parent.parent
PACKAGES = ["lm_eval[api]==0.4.13", "guidellm==0.8.1"]
TOKENIZER = ROOT / "src" / "quire" / "embedded"
TASKS = "tests/data/lm_eval"
MODEL = "quire-embedded"
MAX_LENGTH = 1024
WINDOW = MAX_LENGTH - 2  # tokens that lm_eval scores per request, with one before them and one after
LARGEST_ERROR = 1e-3  # of a log-likelihood
NUM_REQUESTS = 20
INPUT_LEN, OUTPUT_LEN = 64, 32


# The clients' programs, the server's URL, an empty directory, and the model itself -> a description of the result.
Check: TypeAlias = Callable[[Path, str, Path, LLM], str]


class Failed(Exception):
    """A client did not get the expected result."""


def main() -> int:
    """Run all clients. Return 1 if one of them failed."""
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv-clients").absolute()
    binaries = install(directory)
    print(", ".join(versions(binaries)))
    checks = CHECKS | (vllm_checks(Path(sys.argv[2]).absolute()) if len(sys.argv) > 2 else {})
    llm, failed = LLM(), False
    with server("--max-num-seqs", "32") as process:
        for name, check in checks.items():
            try:
                with TemporaryDirectory() as made:
                    shown = check(binaries, process.url, Path(made), llm)
            except Failed as error:
                shown, failed = f"FAILED: {error}", True
            print(f"{name:32s} {shown}", flush=True)
    return int(failed)


def install(directory: Path) -> Path:
    """Install the clients into an environment. Return the directory of its programs."""
    binaries = directory / "bin"
    if not binaries.exists():
        venv.create(directory, with_pip=True)
    pip = [str(binaries / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), *PACKAGES], check=True)
    return binaries


def versions(binaries: Path) -> list[str]:
    """Return the versions of the clients and of torch."""
    listed = subprocess.run([binaries / "pip", "freeze"], check=True, capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line.startswith(("lm_eval==", "guidellm==", "torch=="))]


def run(command: list[str | Path], made: Path, **environment: str) -> None:
    """Run a client without access to any hub. Raises Failed with the end of its output."""
    nowhere = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(made / "home"), **environment}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | nowhere, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")


# ------------------------------------------------------------------------------------------------- lm_eval


def task(
    name: str,
    compare: Callable[[list[dict[str, Any]], LLM], str],
    batch_size: int = 1,
    tokenizer: str = f"huggingface,tokenizer={TOKENIZER}",
) -> Check:
    """Return a check of a task that uses completions. lm_eval tokenizes texts and sends token ids."""
    options = ["--model", "local-completions", "--batch_size", str(batch_size)]
    arguments = f"/v1/completions,max_length={MAX_LENGTH},tokenizer_backend={tokenizer}"
    return lambda binaries, url, made, llm: compare(asked(binaries, made, name, options, url + arguments), llm)


def chat_task(name: str, compare: Callable[[list[dict[str, Any]], LLM], str]) -> Check:
    """Return a check of a task that uses chats."""
    options = ["--model", "local-chat-completions", "--apply_chat_template"]
    arguments = "/v1/chat/completions"
    return lambda binaries, url, made, llm: compare(asked(binaries, made, name, options, url + arguments), llm)


def named_task(name: str, compare: Callable[[list[dict[str, Any]], LLM], str]) -> Check:
    """Return a check of a task with the model quire, in this environment with the packages of the clients."""

    def check(binaries: Path, _: str, made: Path, llm: LLM) -> str:
        [packages] = binaries.parent.glob("lib/python*/site-packages")
        arguments = f"num_blocks=256,max_model_len={MAX_LENGTH - 1},add_bos_token=False"
        program: list[str | Path] = [sys.executable, "-m", "quire.integrations.lm_eval", "run", "--model", "quire"]
        return compare(evaluate(program, made, name, arguments, PYTHONPATH=str(packages)), llm)

    return check


def asked(binaries: Path, made: Path, name: str, options: list[str], arguments: str) -> list[dict[str, Any]]:
    """Run a task with a server. Return its samples."""
    model = f"model={MODEL},num_concurrent=4,base_url={arguments}"
    return evaluate([binaries / "lm_eval", "run", *options], made, name, model)


def evaluate(
    program: list[str | Path], made: Path, name: str, arguments: str, **environment: str
) -> list[dict[str, Any]]:
    """Run a task. Return its samples in lm_eval's format."""
    run([*program, "--model_args", arguments, "--tasks", name, "--include_path", TASKS,
         "--output_path", made / "out", "--log_samples"], made, **environment)  # fmt: skip
    [path] = (made / "out").rglob(f"samples_{name}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def compare_choices(samples: list[dict[str, Any]], llm: LLM) -> str:
    """Compare the log-likelihood of each choice after its text."""
    largest, count = 0.0, 0
    for sample in samples:
        for asked, [[shown, is_greedy]] in zip(sample["arguments"].values(), sample["resps"], strict=True):
            # As in lm_eval, blanks belong to the choice, whose tokens are those after the tokens of the text alone.
            before, whole = (
                tokens_of(llm, text) for text in (asked["arg_0"].rstrip(), asked["arg_0"] + asked["arg_1"])
            )
            found = logprobs(llm, before + whole[len(before) :])[len(before) :]
            largest = max(largest, abs(sum(value for value, _ in found) - float(shown)))
            count += 1
            if all(rank == 1 for _, rank in found) != (str(is_greedy) == "True"):
                raise Failed(f"{asked['arg_1']!r} after {asked['arg_0']!r} is greedy for only one of lm_eval and LLM")
    return within(largest, f"{count} log-likelihoods of choices")


def compare_rolling(samples: list[dict[str, Any]], llm: LLM) -> str:
    """Compare the log-likelihood of each whole text."""
    largest = 0.0
    for sample in samples:
        [asked] = sample["arguments"].values()
        tokens = tokens_of(llm, asked["arg_0"])
        truth = sum(sum(value for value, _ in logprobs(llm, seen)[-count:]) for seen, count in windows(tokens))
        [[shown]] = sample["resps"]
        largest = max(largest, abs(truth - float(shown[0] if isinstance(shown, list) else shown)))
    return within(largest, f"{len(samples)} log-likelihoods of texts")


def windows(tokens: list[int]) -> Iterator[tuple[list[int], int]]:
    """Split a text as lm_eval does. Yield windows with as much context as fits, and the number of tokens to score."""
    shown = [0, *tokens]  # after the token that begins a text
    for start in range(0, len(tokens), WINDOW):
        end = min(start + WINDOW, len(tokens))
        yield shown[max(0, end - WINDOW) : end + 1], end - start


def compare_texts(samples: list[dict[str, Any]], llm: LLM) -> str:
    """Compare the text after each prompt."""
    return compare_outputs(samples, llm, lambda asked: asked)


def compare_chats(samples: list[dict[str, Any]], llm: LLM) -> str:
    """Compare the answer to each chat of one message."""
    template = ChatTemplate.find(TOKENIZER)
    if template is None:
        raise Failed("the embedded model has no chat template")
    return compare_outputs(samples, llm, lambda asked: template.render(json.loads(asked[0]), True))


def compare_outputs(samples: list[dict[str, Any]], llm: LLM, prompt_of: Callable[[Any], str]) -> str:
    """Compare the generated texts with those of LLM for the same prompts."""
    params = SamplingParams(max_tokens=24, temperature=0, stop=["\n"])
    for sample in samples:
        [asked] = sample["arguments"].values()
        [output] = llm.generate([tokens_of(llm, prompt_of(asked["arg_0"]))], params)
        if (shown := sample["resps"][0][0]) != (truth := output.outputs[0].text):
            raise Failed(f"the text after {asked['arg_0']!r} is {shown!r}; that of LLM is {truth!r}")
    return f"{len(samples)} texts equal those of LLM"


def tokens_of(llm: LLM, text: str) -> list[int]:
    """Tokenize a text."""
    if llm.tokenizer is None:
        raise Failed("the embedded model has no tokenizer")
    return llm.tokenizer.encode(text, add_special_tokens=False)


def logprobs(llm: LLM, tokens: list[int]) -> list[tuple[float, int]]:
    """Return the logprob and the rank of each token; the first one has none."""
    [output] = llm.generate([tokens], SamplingParams(max_tokens=1, prompt_logprobs=1))
    found = zip(tokens, output.prompt_logprobs or [], strict=True)
    return [(math.nan, 0) if each is None else (each[token].logprob, each[token].rank) for token, each in found]


def within(largest: float, what: str) -> str:
    """Return a description of the comparison. Raises Failed if the largest error exceeds LARGEST_ERROR."""
    if not largest <= LARGEST_ERROR:
        raise Failed(f"{what} differ by up to {largest:.3g} from those of LLM; expected at most {LARGEST_ERROR:g}")
    return f"{what} equal those of LLM within {largest:.1g}"


# ------------------------------------------------------------------------------------------------- guidellm


def load(route: str, profile: str) -> Check:
    """Return a check of a load on a route."""

    def check(binaries: Path, url: str, made: Path, _: LLM) -> str:
        path = made / "report.json"
        run([binaries / "guidellm", "run", "--disable-console-interactive",
             "--backend", f"kind=openai_http,target={url},model={MODEL},request_format={route},stream=true",
             "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
             "--data", f"kind=synthetic_text,prompt_tokens={INPUT_LEN},output_tokens={OUTPUT_LEN}",
             "--profile", profile, "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
             "--output", f"kind=json,path={path}"], made)  # fmt: skip
        [benchmark] = json.loads(path.read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        if totals != {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}:
            raise Failed(f"of {NUM_REQUESTS} requests: {totals}")
        for request in benchmark["requests"]["successful"]:
            if request["output_tokens"] != OUTPUT_LEN or request["time_to_first_token_ms"] is None:
                raise Failed(f"a request got {request['output_tokens']} tokens, streamed; expected {OUTPUT_LEN}")
        return f"{NUM_REQUESTS} requests of {OUTPUT_LEN} tokens, streamed"

    return check


# ------------------------------------------------------------------------------------------------- vLLM

# The command itself looks for a package named vllm, but vLLM's builds for CPUs have another name.
BENCH_SERVE = """
from argparse import ArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
parser = ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def vllm_checks(python: Path) -> dict[str, Check]:
    """Return checks of `vllm bench serve`. `python` is the Python of an environment with vLLM."""
    routes = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
    return {f"vllm bench serve, {kind}": bench_serve(python, kind, route) for kind, route in routes.items()}


def bench_serve(python: Path, backend: str, route: str) -> Check:
    """Return a check of `vllm bench serve` on a route."""

    def check(_: Path, url: str, made: Path, __: LLM) -> str:
        run([python, "-c", BENCH_SERVE, "--backend", backend, "--endpoint", route, "--base-url", url,
             "--model", MODEL, "--tokenizer", str(TOKENIZER), "--dataset-name", "random", "--ignore-eos",
             "--random-input-len", str(INPUT_LEN), "--random-output-len", str(OUTPUT_LEN),
             "--num-prompts", str(NUM_REQUESTS), "--save-result", "--result-filename", str(made / "out.json")],
            made)  # fmt: skip
        found = json.loads((made / "out.json").read_text())
        totals = [found[name] for name in ("completed", "failed", "total_output_tokens")]
        if totals != [NUM_REQUESTS, 0, NUM_REQUESTS * OUTPUT_LEN]:
            raise Failed(f"of {NUM_REQUESTS} requests {totals[0]} passed and {totals[1]} failed, {totals[2]} tokens")
        return f"{NUM_REQUESTS} requests of {OUTPUT_LEN} tokens, streamed"

    return check


CHECKS: dict[str, Check] = {
    "lm_eval multiple_choice": task("quire_choice", compare_choices),
    "lm_eval, several at a time": task("quire_choice", compare_choices, batch_size=4),
    "lm_eval loglikelihood_rolling": task("quire_rolling", compare_rolling),
    "lm_eval generate_until": task("quire_generate", compare_texts),
    "lm_eval, the server's tokenizer": task("quire_choice", compare_choices, tokenizer="remote"),
    "lm_eval rolling, the same": task("quire_rolling", compare_rolling, tokenizer="remote"),
    "lm_eval chat generate_until": chat_task("quire_generate", compare_chats),
    "lm_eval by name, multiple_choice": named_task("quire_choice", compare_choices),
    "lm_eval by name, rolling": named_task("quire_rolling", compare_rolling),
    "lm_eval by name, generate_until": named_task("quire_generate", compare_texts),
    "guidellm completions": load("/v1/completions", "kind=concurrent,streams=4"),
    "guidellm chat completions": load("/v1/chat/completions", "kind=poisson,rate=20"),
}

if __name__ == "__main__":
    sys.exit(main())
