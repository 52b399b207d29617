"""Plot of a simulated fleet over time. Requires matplotlib."""

from __future__ import annotations

from pathlib import Path

from quire.errors import ConfigError
from quire.simulate.outcome import Outcome


def check_plot(path: Path) -> None:
    """Raise ConfigError if no plot can be written there. Call this before the simulation."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ConfigError(f"--plot is {path}; its ending must be one of {', '.join(known)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot is {path}; there is no directory {path.parent}")


def plot(outcome: Outcome, path: Path) -> None:
    """Plot time to first token, tokens a second, hits, cache use, replicas and requests. Raises ConfigError."""
    check_plot(path)
    from matplotlib.figure import Figure

    width, moments = outcome.resolution, sorted(outcome.moments.items())
    times = [at * width for at, _ in moments]
    numbers = [one.numbers for _, one in moments]
    panels: dict[str, dict[str, list[float]]] = {
        "time to first token, s": {
            "mean": [one.ttft.mean for _, one in moments],
            "p90": [one.ttft.percentile(90) for _, one in moments],
        },
        "new tokens a second": {"": [one["new_tokens"] / width for one in numbers]},
        "prompt tokens cached": {"": [one["cached_tokens"] / max(1, one["prompt_tokens"]) for one in numbers]},
        "blocks in use": {"": [one["used_blocks"] / max(1, one["blocks"]) for one in numbers]},
        "replicas": {"": [one["replicas"] for one in numbers]},
        "requests": {name: [one[name] for one in numbers] for name in ("running", "waiting")},
    }
    figure = Figure(figsize=(11, 9), layout="constrained")
    for panel, (title, lines) in zip(figure.subplots(3, 2).flat, panels.items(), strict=True):
        for name, values in lines.items():
            panel.plot(times, values, label=name or None)
        panel.set(title=title, xlabel="s", ylim=(0, None))
        if any(lines):
            panel.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
