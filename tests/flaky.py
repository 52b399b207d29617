"""Run each test that failed once more at the end of the run, alone and with the same parameters.

A busy machine upsets a test now and then. A test that passes alone is flaky: it is listed with both outputs, and the
run passes if it has at most two of them and no other failure. Errors of collection, workers that crash and more than
ten failures fail as they do without this plugin. `pytest -p no:tests.flaky` leaves it out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator

import pytest

MOST_FLAKY = 2
MOST_FAILED = 10  # more are not the machine's


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers send their reports to the process that started them
        config.pluginmanager.register(Reruns(config))


class Reruns:
    """The tests that failed, and those of them that passed alone."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.failed: dict[str, list[pytest.TestReport]] = defaultdict(list)
        self.flaky: dict[str, str] = {}  # what each printed alone

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.when in ("setup", "call", "teardown"):  # a worker that crashed reports "???"
            self.failed[report.nodeid].append(report)

    @pytest.hookimpl(trylast=True)  # after fixtures are torn down, and xdist's workers have ended
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus != pytest.ExitCode.TESTS_FAILED or session.shouldfail or len(self.failed) > MOST_FAILED:
            return
        for nodeid in self.failed:
            self.config.get_terminal_writer().line(f"\nonce more, alone: {nodeid}")
            alone = self.run_alone(nodeid)
            if alone.returncode == pytest.ExitCode.OK:
                self.flaky[nodeid] = alone.stdout
        explained = sum(len(self.failed[nodeid]) for nodeid in self.flaky)
        if explained == session.testsfailed and len(self.flaky) <= MOST_FLAKY:
            session.exitstatus = pytest.ExitCode.OK

    def run_alone(self, nodeid: str) -> subprocess.CompletedProcess[str]:
        """Run one test in a process of its own, with this run's options and, as in its workers, number of threads."""
        given = [str(each) for each in self.config.invocation_params.args]
        options = [each for each in given if each not in self.config.option.file_or_dir]
        if self.config.pluginmanager.hasplugin("xdist"):
            options.append("--numprocesses=0")
        workers = len(self.config.getoption("tx", []))
        return subprocess.run(
            [sys.executable, "-m", "pytest", *options, "-rP", f"-pno:{__name__}", str(self.config.rootpath / nodeid)],
            check=False,
            cwd=self.config.invocation_params.dir,
            env=os.environ | {"PYTEST_XDIST_WORKER_COUNT": str(workers)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
        stats = terminalreporter.stats
        for kind in ("failed", "error"):
            stats[kind] = [report for report in stats.get(kind, []) if report.nodeid not in self.flaky]
        stats["flaky"] = [report for nodeid in self.flaky for report in self.failed[nodeid][:1]]
        yield
        for nodeid, printed in self.flaky.items():
            terminalreporter.section(f"flaky: {nodeid}", "=", yellow=True)
            for report in self.failed[nodeid]:
                terminalreporter.line(f"--- {report.when} failed among the others:")
                terminalreporter.line(report.longreprtext)
                for title, text in report.sections:
                    terminalreporter.line(f"--- {title}\n{text}")
            terminalreporter.line(f"--- passed alone:\n{printed}")
        if len(self.flaky) > MOST_FLAKY:
            terminalreporter.line(
                f"{len(self.flaky)} tests are flaky; a run passes with at most {MOST_FLAKY}", red=True
            )
