"""Check the files of deploy/ with the programs that read them: Kubernetes's schemas, systemd, and a real Prometheus.

`python tools/check_deploy.py [DIRECTORY]` installs the schemas into the virtual environment DIRECTORY, which is
.venv-deploy by default. It needs the programs prometheus and promtool, which Debian's package prometheus has, and
systemd-analyze. Prometheus scrapes a replica and a gateway with a key on this machine, with the alerts of the chart.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import venv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from quire_bench.server.process import running, server  # noqa: E402
from tests.helm import VARIANTS, objects_of, pods  # noqa: E402

PACKAGE = "kubernetes-validate==1.37.0"
CUSTOM = ("RayService", "PodMonitor", "PrometheusRule")  # kinds that Kubernetes itself does not have
PROMETHEUS, RULES = ROOT / "deploy" / "prometheus", ROOT / "deploy" / "helm" / "quire" / "rules.yml"
WAIT = 60.0  # seconds until an expectation must hold
SECRET, KEY = "a secret", "a key"


class Failed(Exception):
    """A file is not what its program expects."""


def main() -> int:
    """Run all checks. Return 1 if one of them failed."""
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv-deploy").absolute()
    checks: dict[str, Callable[[Path], str]] = {
        "Kubernetes's schemas": lambda made: check_schemas(directory, made),
        "systemd-analyze verify": check_unit,
        "promtool": check_rules,
        "Prometheus": check_scrapes,
    }
    failed = False
    for name, check in checks.items():
        try:
            with TemporaryDirectory() as made:
                shown = check(Path(made))
        except Failed as error:
            shown, failed = f"FAILED: {error}", True
        print(f"{name:24s} {shown}", flush=True)
    return int(failed)


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Return the output of a command. Raises Failed with it if its status is not 0."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"{' '.join(map(str, command))}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def check_schemas(directory: Path, made: Path) -> str:
    """Validate all objects of the chart's variants, and the pods in those of other kinds, by Kubernetes's schemas."""
    if not (directory / "bin").exists():
        venv.create(directory, with_pip=True)
    run(directory / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", PACKAGE)
    found: list[dict[str, Any]] = []
    for variant in VARIANTS:
        objects = objects_of(variant)
        found += [one for one in objects if one["kind"] not in CUSTOM]
        metadata = {"name": "a-pod"}
        found += [
            {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": pod["metadata"] | metadata} for pod in pods(objects)
        ]
    (made / "all.yaml").write_text(yaml.safe_dump_all(found))
    shown = run(directory / "bin" / "kubernetes-validate", "--strict", made / "all.yaml").splitlines()
    wrong = [line for line in shown if not line.startswith("INFO")]
    if wrong or len(shown) != len(found):
        raise Failed("\n".join(wrong) or f"{len(shown)} of {len(found)} objects were validated")
    return f"{len(found)} objects"


def check_unit(made: Path) -> str:
    """Verify the unit, with a program that this machine has."""
    unit = made / "quire.service"
    text = (ROOT / "deploy" / "systemd" / "quire.service").read_text()
    unit.write_text(text.replace("/opt/quire/bin/quire", "/bin/true"))
    run("systemd-analyze", "verify", unit)
    exposure = re.search(
        r"Overall exposure level .*: ([\d.]+)", run("systemd-analyze", "security", "--offline=yes", unit)
    )
    if exposure is None or float(exposure[1]) > 2:
        raise Failed(f"the exposure level is {exposure and exposure[1]}; it was 1.7")
    return f"exposure level {exposure[1]} of 10"


def check_rules(_: Path) -> str:
    """Check the configuration and the alerts, and run the tests of the alerts."""
    run("promtool", "check", "config", "--lint-fatal", PROMETHEUS / "prometheus.yml")
    run("promtool", "test", "rules", "rules_test.yml", cwd=PROMETHEUS)
    return f"{len(alerts())} alerts"


def alerts() -> dict[str, str]:
    """Return the expression of each alert."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def check_scrapes(made: Path) -> str:
    """Scrape a replica and a gateway: all metrics of the alerts exist, and a replica that is killed is reported."""
    with ExitStack() as stack:
        replica = stack.enter_context(server("--fleet-secret", SECRET, "--kv-disk", str(made / "blocks")))
        members = ("--replicas", replica.url, "--fleet-secret", SECRET)
        gateway = stack.enter_context(running("fleet", "--port", "0", *members, "--api-key", KEY))
        with suppress(urllib.error.HTTPError):  # one refusal, else there is no counter of them
            urllib.request.urlopen(f"{replica.url}/nothing", timeout=10)
        url = stack.enter_context(prometheus(made, [replica.url, gateway.url]))
        until(lambda: len(ask(url, 'up{job="quire"} == 1')) == 2, "two targets are scraped")
        names = {name for rule in alerts().values() for name in re.findall(r"quire:\w+", rule)}
        until(lambda: not names - {one["__name__"] for one in ask(url, '{__name__=~"quire:.*"}')}, f"all of {names}")
        until(lambda: bool(ask(url, "prometheus_rule_group_iterations_total > 2")), "the alerts are evaluated")
        if firing := ask(url, "ALERTS"):
            raise Failed(f"these alerts fire while all is well: {firing}")
        os.kill(replica.pid, signal.SIGKILL)
        expected = {"QuireDown", "QuireReplicaDown"}
        until(lambda: {one["alertname"] for one in ask(url, 'ALERTS{alertstate="firing"}')} == expected, f"{expected}")
    return f"{len(names)} metrics of {len(alerts())} alerts; a killed replica is reported"


@contextmanager
def prometheus(made: Path, urls: list[str]) -> Iterator[str]:
    """Run a Prometheus with the repository's configuration for these servers, and without delays. Yield its URL.

    made: a directory for its files.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config |= {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": ["rules.yml"]}
    [scrape] = config["scrape_configs"]
    scrape["static_configs"] = [{"targets": [urllib.parse.urlsplit(url).netloc for url in urls]}]
    scrape["authorization"] = {"credentials": KEY}
    config["scrape_configs"].append({"job_name": "prometheus", "static_configs": [{"targets": [address]}]})
    (made / "prometheus.yml").write_text(yaml.safe_dump(config))
    (made / "rules.yml").write_text(re.sub(r"^( +for:) \w+$", r"\1 0s", RULES.read_text(), flags=re.MULTILINE))
    options = ("--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}")
    with (made / "log").open("wb") as log:
        process = subprocess.Popen(["prometheus", *options], cwd=made, stdout=log, stderr=log)
        try:
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(30)


def ask(url: str, query: str) -> list[dict[str, str]]:
    """Return the labels of the series that a query finds; none while Prometheus does not answer."""
    try:
        with urllib.request.urlopen(
            f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=10
        ) as answer:
            return [one["metric"] for one in json.load(answer)["data"]["result"]]
    except OSError:
        return []


def until(holds: Callable[[], bool], expected: str) -> None:
    """Wait until something holds. Raises Failed if it does not for a minute."""
    end = time.monotonic() + WAIT
    while not holds():
        if time.monotonic() > end:
            raise Failed(f"it does not come true that Prometheus sees: {expected}")
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
