"""Results as files: figures and where they are from, read back as the page of results reads them."""

import json
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire_bench.tables import command, save


def test_figures_are_saved_with_their_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/quire", "bench", "latency", "--model", "a b", "--save", "x.json", "--json"])
    rows = [{"name": "a", "ttft": {"mean": 0.5, "p50": 0.25}, "runs": [1, 2]}, {"name": "b", "more": None}]
    save(tmp_path / "x.json", "Latency", rows)
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["columns"] == ["name", "ttft mean", "ttft p50", "more"]
    assert found["rows"] == [["a", 0.5, 0.25, None], ["b", None, None, None]]
    assert found["command"] == "quire bench latency --model 'a b' --json"
    assert found.keys() == {"title", "command", "date", "commit", "machine", "note", "columns", "rows"}
    save(None, "Latency", rows)
    with pytest.raises(ConfigError, match="cannot be written"):
        save(tmp_path, "Latency", rows)


def test_the_command_of_a_module() -> None:
    words = ["/there/quire_bench/peers/__main__.py", "--runs", "3", "--save", "x.json"]
    assert command(words) == "python -m quire_bench.peers --runs 3"
