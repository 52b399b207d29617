"""Train the embedded model on the standard library's source, and write all files that ship with it.

    python tools/train_tiny.py [--work build/train_tiny] [--steps N]

Needs torch (2.9 or later, for Muon), transformers, tokenizers, safetensors, rich, numpy and a C++ compiler. A run that
was interrupted continues from the checkpoint in --work. A completed run exports and evaluates again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import re
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import ngram
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
END, SEED, CONTEXT, VOCABULARY = "<|endoftext|>", 20240117, 1024, 2048
STEPS, WARM_UP, BATCH_TOKENS = 3500, 100, 4096
# Attention over long windows is slow on a CPU, so most steps use short ones. Before the long ones, the held-out loss
# includes positions that are not trained yet.
SHORT_CONTEXT, SHORT_SHARE = 256, 0.7
MUON_RATE, ADAM_RATE, WEIGHT_DECAY = 5e-3, 5e-3, 0.1
CHECKPOINT_SECONDS, EVALUATE_EVERY, REPORT_EVERY = 120, 250, 50

# Tests, generated tables, and the files that hold the paths and flags of one particular build of Python.
SKIPPED_FOLDERS = {"site-packages", "__pycache__", "test", "tests", "idle_test"}
TABLES = ("cp", "mac_", "iso8859", "koi8", "kz1048", "ptcp154", "hp_roman8", "palmos", "tis_620")
SKIPPED_FILES = (*(f"encodings/{name}*.py" for name in TABLES), "_sysconfigdata*.py", "config-*/*.py")
# One file in 16 is held out unless it is large, so that no single file dominates: about 2 % of the bytes.
HELD_OUT_ONE_IN, HELD_OUT_LARGEST = 16, 25_000
NOTICE = """Unchanged files of the Python standard library, CPython {version} ("a__b.py.txt" was "a/b.py"): text
that the embedded model was not trained on, by which it is measured.

Copyright (c) 2001-2023 Python Software Foundation; All Rights Reserved. Distributed under the Python Software
Foundation License Version 2; its text, and that of the older licenses it comes with, is in LICENSE beside this.
"""

# A line end with the blank lines and the indentation after it is one piece, so that an indent can be one token.
# A word includes one sign or space before it ("(self", "_name"). Digits are separate.
PIECES = r"\n[\n ]*|[^\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def collect(library: Path) -> dict[str, str]:
    """Return the text of every file used, by its path below the library, in sorted order."""
    paths = {path.relative_to(library).as_posix(): path for path in library.rglob("*.py")}
    texts = {}
    for name, path in sorted(paths.items()):
        tests = SKIPPED_FOLDERS.intersection(Path(name).parts[:-1])
        if not tests and not any(fnmatch(name, pattern) for pattern in SKIPPED_FILES):
            texts[name] = path.read_bytes().decode("utf-8")
    return {name: text for name, text in texts.items() if text}


def split(texts: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split files into training and held-out ones by a hash of the path. Near-duplicates stay in training."""

    def chosen(name: str) -> bool:
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        return number % HELD_OUT_ONE_IN == 0 and len(texts[name].encode()) <= HELD_OUT_LARGEST

    def long_lines(text: str) -> set[str]:
        return {line.strip() for line in text.splitlines() if len(line.strip()) >= 20}

    seen = set[str]().union(*(long_lines(text) for name, text in texts.items() if not chosen(name)))
    held_out = {}
    for name in filter(chosen, texts):
        lines = long_lines(texts[name])
        if lines and len(lines & seen) < len(lines) / 3:
            held_out[name] = texts[name]
    return {name: text for name, text in texts.items() if name not in held_out}, held_out


def write_held_out(held_out: dict[str, str], folder: Path, library: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.txt"):
        path.unlink()
    for name, text in held_out.items():
        (folder / (name.replace("/", "__") + ".txt")).write_bytes(text.encode())
    (folder / "NOTICE").write_text(NOTICE.format(version=platform.python_version()))
    shutil.copyfile(library / "LICENSE.txt", folder / "LICENSE")


def make_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(PIECES), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet)
    )
    start = processors.TemplateProcessing(f"{END} $A", f"{END} $A {END} $B:1", [(END, 0)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), start])
    for text in texts:
        if tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) != text:
            raise ValueError("the tokenizer does not give a text back unchanged")
    return tokenizer


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    size = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 5}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": CONTEXT}
    other = {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**size, **heads, **other, **ends))


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    adam = torch.optim.AdamW([model.model.embed_tokens.weight], betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    adam.add_param_group({"params": norms, "weight_decay": 0.0})
    return [torch.optim.Muon(matrices, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"), adam]


def rate(step: int, steps: int) -> float:
    """Return the learning rate relative to its peak: linear warm-up, then a cosine to zero."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP)))


def batch_at(stream: Tensor, step: int, steps: int) -> Tensor:
    """Return the windows of one step. They depend on the step alone, so a resumed run sees the same ones."""
    length = SHORT_CONTEXT if step < SHORT_SHARE * steps else CONTEXT
    generator = torch.Generator().manual_seed(SEED + step)
    starts = torch.randint(len(stream) - length, (BATCH_TOKENS // length,), generator=generator)
    return torch.stack([F.pad(stream[start : start + length], (1, 0)) for start in starts.tolist()])


@torch.no_grad()
def nats_per_byte(model: LlamaForCausalLM, tokenizer: Tokenizer, texts: list[str]) -> float:
    """Return the held-out loss as the model card defines it."""
    total = 0.0
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        for start in range(0, len(ids), CONTEXT - 1):
            window = torch.tensor([0, *ids[start : start + CONTEXT - 1]])
            logits = model(window[None, :-1]).logits.float()
            total += F.cross_entropy(logits[0], window[1:], reduction="sum").item()
    return total / sum(len(text.encode()) for text in texts)


def train(
    model: LlamaForCausalLM,
    stream: Tensor,
    steps: int,
    path: Path,
    evaluate: Callable[[], float],
    saved: Callable[[], None],
) -> float:
    """Train up to `steps`, from the checkpoint at `path` if it exists. Return the seconds of all runs."""
    optimizers = make_optimizers(model)
    run = {"steps": steps, "stream": hashlib.sha256(stream.numpy().tobytes()).hexdigest()}
    step, used = 0, 0.0
    if path.exists():
        state = torch.load(path, weights_only=True)
        if state["run"] != run:
            raise SystemExit(f"{path} belongs to a run on another text or of another length; remove it")
        model.load_state_dict(state["model"])
        for optimizer, optimizer_state in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
        step, used = state["step"], state["seconds"]

    def loss_of(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    compiled = torch.compile(loss_of, dynamic=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    started = last_saved = time.monotonic()
    smooth = held_out = float("nan")
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=steps, completed=step)
        while step < steps:
            for optimizer, peak in zip(optimizers, (MUON_RATE, ADAM_RATE), strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = peak * rate(step, steps)
            loss = compiled(batch_at(stream, step, steps))
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            smooth = loss.item() if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss.item()
            if step % EVALUATE_EVERY == 0:
                held_out = evaluate()
            line = f"loss {smooth:.3f} nats per token, held-out {held_out:.4f} nats per byte"
            progress.update(task, completed=step, description=line)
            seconds = used + time.monotonic() - started
            if step % REPORT_EVERY == 0:  # a log file has no moving bar
                progress.console.print(f"step {step} of {steps}, {seconds:.0f} s: {line}", soft_wrap=True)
            if step == steps or time.monotonic() - last_saved > CHECKPOINT_SECONDS:
                state = {"run": run, "step": step, "seconds": seconds, "model": model.state_dict()}
                state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
                torch.save(state, beside := path.with_suffix(".part"))
                os.replace(beside, path)
                saved()
                last_saved = time.monotonic()
    return used + time.monotonic() - started


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write model and tokenizer in the format of transformers. Each file is replaced atomically."""
    shipped = make_model()
    shipped.load_state_dict(model.state_dict())
    shipped.to(torch.bfloat16)
    shipped.generation_config = GenerationConfig(
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        temperature=0.5,
        repetition_penalty=1.15,  # no loops
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT}
    settings |= {"bos_token": END, "eos_token": END, "pad_token": END, "clean_up_tokenization_spaces": False}
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        shipped.save_pretrained(folder)
        tokenizer.save(f"{folder}/tokenizer.json")
        Path(folder, "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        for path in Path(folder).iterdir():
            path.chmod(0o644)
            os.replace(path, out / path.name)


def write_card(card: dict[str, str | int | float], out: Path) -> None:
    """Write the numbers to card.json, and as rows of the table in the model card README.md."""
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    rows = "".join(f"| {name.replace('_', ' ')} | {value} |\n" for name, value in card.items())
    text = (ROOT / "src" / "quire" / "embedded" / "README.md").read_text()
    (out / "README.md").write_text(re.sub(r"(?<=\| --- \| --- \|\n)(\|.*\n)*", rows, text))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "train_tiny", help="holds the checkpoint")
    parser.add_argument("--out", type=Path, default=ROOT / "src" / "quire" / "embedded")
    parser.add_argument("--held-out", type=Path, default=ROOT / "tests" / "data" / "heldout")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)

    library = Path(sysconfig.get_paths()["stdlib"])
    train_texts, held_out_texts = split(collect(library))
    write_held_out(held_out_texts, options.held_out, library)
    texts, held_out = list(train_texts.values()), list(held_out_texts.values())
    tokenizer = make_tokenizer(texts)
    encoded = [[0, *tokenizer.encode(text, add_special_tokens=False).ids] for text in texts]
    stream = torch.tensor([token for ids in encoded for token in ids])
    model = make_model()

    def evaluate() -> float:
        return nats_per_byte(model, tokenizer, held_out)

    def saved() -> None:
        if not (options.out / "model.safetensors").exists():
            export(model, tokenizer, options.out)  # an early model allows testing of the other parts

    seconds = train(model, stream, options.steps, options.work / "checkpoint.pt", evaluate, saved)
    export(model, tokenizer, options.out)
    shipped = LlamaForCausalLM.from_pretrained(options.out, dtype=torch.float32)
    loss = nats_per_byte(shipped, tokenizer, held_out)
    baseline = ngram.nats_per_byte(ngram.fit(map(str.encode, texts)), map(str.encode, held_out))
    joined = "".join(texts).encode()
    card: dict[str, str | int | float] = {}
    for name, nats in ("heldout", loss), ("ngram", baseline):
        card |= {f"{name}_nats_per_byte": round(nats, 4), f"{name}_bits_per_byte": round(nats / math.log(2), 4)}
    card |= {"heldout_files": len(held_out), "heldout_bytes": len("".join(held_out).encode())}
    card |= {"train_files": len(texts), "train_bytes": len(joined), "train_tokens": len(stream)}
    card |= {"train_sha256": hashlib.sha256(joined).hexdigest(), "python": platform.python_version()}
    card |= {"parameters": shipped.num_parameters(), "steps": options.steps, "tokens_per_step": BATCH_TOKENS}
    card |= {"seed": SEED, "minutes": round(seconds / 60)}
    write_card(card, options.out)


if __name__ == "__main__":
    main()
