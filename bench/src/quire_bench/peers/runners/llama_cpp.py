"""llama.cpp through its Python binding, on a bf16 GGUF file: all prompts, then all sequences a token at a time.

Its environment: `pip install llama-cpp-python gguf`, which compiles for about ten minutes.
"""

from __future__ import annotations

from quire_bench.peers.runners.protocol import Generate, Settings, serve

BATCH = 2048  # tokens of a call at most


def start(settings: Settings) -> tuple[str, Generate]:
    """The version and what generates."""
    import llama_cpp as library
    import numpy as np

    if settings.model is None:
        raise SystemExit("llama.cpp needs a file")
    library.llama_backend_init()
    model = library.llama_model_load_from_file(settings.model.encode(), library.llama_model_default_params())
    params = library.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.kv_unified = settings.max_tokens, settings.max_requests, True
    params.n_batch = BATCH
    params.n_threads = params.n_threads_batch = settings.threads
    context = library.llama_init_from_model(model, params)
    vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    batch = library.llama_batch_init(BATCH, 0, 1)

    def decode(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute rows of token, position, sequence and whether its next token is wanted; the most likely ones."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if library.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        wanted_rows = sum(wanted for *_, wanted in rows)
        if not wanted_rows:
            return []
        logits = np.ctypeslib.as_array(library.llama_get_logits(context), (wanted_rows, vocabulary))
        found: list[int] = logits.argmax(1).tolist()
        return found

    def generate(prompts: list[list[int]], new_tokens: list[int]) -> list[int]:
        library.llama_memory_clear(library.llama_get_memory(context), True)
        given = [0] * len(prompts)
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        while rows:
            following = []
            for at in range(0, len(rows), BATCH):
                piece = rows[at : at + BATCH]
                ends = [(position, sequence) for _, position, sequence, wanted in piece if wanted]
                for token, (position, sequence) in zip(decode(piece), ends, strict=True):
                    given[sequence] += 1
                    if given[sequence] < new_tokens[sequence]:
                        following.append((token, position + 1, sequence, True))
            rows = following
        return given

    return library.__version__, generate


if __name__ == "__main__":
    serve(start)
