"""A GGUF file of 16 bits rounded by llama.cpp: quantize_gguf FROM TO KIND, of q8_0, q4_0 and q4_k_m."""

from __future__ import annotations

import os
import sys

TYPES = {"q4_0": 2, "q8_0": 7, "q4_k_m": 15}  # llama.cpp's numbers of them


def main(source: str, target: str, kind: str) -> None:
    """Write the file. Ends the program where llama.cpp cannot."""
    import llama_cpp as library

    library.llama_backend_init()
    params = library.llama_model_quantize_default_params()
    params.ftype, params.nthread = TYPES[kind], os.cpu_count() or 1
    if library.llama_model_quantize(source.encode(), target.encode(), params):
        sys.exit(f"llama.cpp could not write {target} as {kind}")


if __name__ == "__main__":
    main(*sys.argv[1:])
