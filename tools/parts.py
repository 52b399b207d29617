"""Print the parts of `.ci/parts` that cover the changes of a branch, one per line: `python tools/parts.py`.

A branch is compared with the commit at which it left origin/main; uncommitted changes count. On main, and in a clone
without origin/main, there is nothing to compare with and nothing is printed. The nightly workflow runs all parts.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parent.parent

# The files that each part covers. An asterisk matches any part of a path, slashes included.
PARTS = {
    "wheel": (
        *("pyproject.toml", "bench/pyproject.toml", "constraints.txt", "CMakeLists.txt", "Makefile", "LICENSE"),
        *("src/quire/ops/cpu/csrc/*", "src/quire/embedded/*", "src/quire/importing.py", "tests/test_wheel.py"),
        *("tools/check_install.py", "tools/check_wheel.py", ".ci/parts"),
    ),
    "documents": (
        *("*.md", "docs/*", "mkdocs.yml", "tools/docs.py", "tools/griffe_comments.py", "tests/test_walkthroughs.py"),
        "tests/test_site.py",
        *("CMakeLists.txt", "src/quire/ops/cpu/csrc/*", "src/quire/ops/native.py", "src/quire/ops/backend.py"),
        *("src/quire/models/families/*", ".ci/parts"),
    ),
    "clients": (
        *("src/quire/server/*", "src/quire/sandbox/*", "src/quire/frontend/*"),
        *("bench/src/quire_bench/server/*", "tests/data/lm_eval/*", "tools/check_clients.py", "tools/check_agents.py"),
        *("constraints.txt", ".ci/parts"),
    ),
    "ray": (
        *("src/quire/ray/*", "src/quire/fleet/*", "tests/ray/*", "deploy/kuberay/*", "examples/fleets/*"),
        *("pyproject.toml", "constraints.txt", ".ci/parts"),
    ),
    "triton": (
        *("src/quire/ops/triton/*", "tests/ops/triton_backend/*", "tests/interpreter.py", "constraints.txt"),
        ".ci/parts",
    ),
    "formats": (
        *("src/quire/models/quantisation/*", "src/quire/models/weights.py", "src/quire/models/convert.py"),
        *("tools/check_formats.py", "tools/write_formats.py", ".ci/parts"),
    ),
    "deploy": (
        *("deploy/*", "tests/helm.py", "tests/test_deploy.py", "src/quire/frontend/metrics.py"),
        *("src/quire/fleet/metrics.py", "tools/check_deploy.py", ".ci/parts"),
    ),
    "encoders": (
        *("src/quire/models/families/encoders.py", "src/quire/models/pooling*.py", "src/quire/ops/ragged.py"),
        *("tools/check_encoders.py", "tools/write_embeddings.py", ".ci/parts"),
    ),
}
# The files that lint, the suite and the nightly runs cover. Add a new package or tool here or to a part.
SUITE = (
    *("tests/*", "bench/*", "examples/*", "deploy/*", ".github/*", ".ci/*", "conftest.py"),
    *(".clang-format", ".codespellrc", ".gitignore", ".pre-commit-config.yaml", "Containerfile"),
    *(
        "src/quire/__init__.py",
        "src/quire/__main__.py",
        "src/quire/py.typed",
        "src/quire/config.py",
        "src/quire/errors.py",
    ),
    *("src/quire/progress.py", "src/quire/request.py", "src/quire/text.py", "src/quire/embedding.py"),
    *("src/quire/loglikelihood.py", "src/quire/inputs.py", "src/quire/metrics.py", "src/quire/outputs.py"),
    *("src/quire/sampling_params.py", "src/quire/lora/*"),
    *(
        "src/quire/fingerprint/*",
        "src/quire/cache/*",
        "src/quire/cli/*",
        "src/quire/diff/*",
        "src/quire/router/*",
        "src/quire/engine/*",
        "src/quire/integrations/*",
    ),
    *("src/quire/models/*", "src/quire/ops/*", "src/quire/parallel/*", "src/quire/simulate/*", "src/quire/terminal/*"),
    *(
        "tools/check_build.py",
        "tools/check_message.py",
        "tools/check_prose.py",
        "tools/emulate.py",
        "tools/inspector_*.py",
        "tools/lowest.py",
        "tools/ngram.py",
        "tools/performance_page.py",
    ),
    *("tools/parts.py", "tools/release.py", "tools/train_mtp.py", "tools/train_tiny.py"),
)


def main() -> None:
    """Print the parts of this repository's branch."""
    print("".join(f"{part}\n" for part in touched(changed(ROOT))), end="")


def touched(paths: Iterable[str]) -> list[str]:
    """Return the parts that cover one of these files, in the table's order."""
    paths = list(paths)
    return [part for part, patterns in PARTS.items() if any(matches(path, patterns) for path in paths)]


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Return whether a path matches one of the patterns."""
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def changed(root: Path) -> list[str]:
    """Return the tracked files that differ from the commit at which this branch left origin/main."""
    git = ["git", "-C", str(root)]
    base = subprocess.run([*git, "merge-base", "HEAD", "origin/main"], capture_output=True, text=True, check=False)
    if base.returncode != 0:
        return []
    listed = [*git, "diff", "--name-only", "--no-renames", "-z", base.stdout.strip()]
    return [path for path in subprocess.check_output(listed, text=True).split("\0") if path]


if __name__ == "__main__":
    main()
