"""Prometheus metrics: the numbers after scripted runs, the text that a scrape gets, and the Grafana board's names."""

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from operator import mul
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from quire.cache.groups import CacheGroup, RowGroup, StateGroup, StatePools
from quire.engine.engine import Engine
from quire.engine.speculation import PromptLookup, Speculation
from quire.frontend.metrics import Metrics, RequestClock
from quire.request import Request
from tests.engine.fakes import CIRCLE, circling, fake_engine, request, siblings
from tests.server.serving import serving

BOARD = Path(__file__).parent.parent.parent / "deploy" / "grafana" / "quire.json"
LABELS = {"model_name": "a model", "engine": "0"}
# What boards made for vLLM read, its own one among them.
VLLM_NAMES = """
num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info prefix_cache_queries_total
prefix_cache_hits_total prompt_tokens_cached_total num_preemptions_total prompt_tokens_total generation_tokens_total
request_success_total time_to_first_token_seconds_bucket inter_token_latency_seconds_sum
request_time_per_output_token_seconds_count e2e_request_latency_seconds_bucket request_queue_time_seconds_sum
request_prefill_time_seconds_sum request_decode_time_seconds_sum request_inference_time_seconds_sum
request_prompt_tokens_bucket request_generation_tokens_bucket request_max_num_generation_tokens_sum
request_params_max_tokens_sum request_params_n_sum iteration_tokens_total_bucket
""".split()


class Samples:
    """One scrape: the value of each sample."""

    def __init__(self, metrics: Metrics) -> None:
        text = metrics.render("")[0].decode()
        families = list(text_string_to_metric_families(text))
        self.values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self.values[name, frozenset((LABELS | labels).items())]

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.values}

    def buckets(self, name: str) -> list[tuple[float, float]]:
        found = ((dict(labels), value) for (other, labels), value in self.values.items() if other == f"{name}_bucket")
        return sorted((float(labels["le"]), value) for labels, value in found)


class Driver:
    """Steps an engine as a server does, and tells its metrics what came."""

    def __init__(self, engine: Engine, vllm_names: bool = False) -> None:
        self.engine = engine
        self.metrics = Metrics(engine, "a model", vllm_names)
        self.clocks: dict[str, RequestClock] = {}

    def add(self, *requests: Request) -> None:
        for one in requests:
            self.engine.add(one)
            self.clocks[one.id] = self.metrics.request(one.num_prompt, one.sampling.max_tokens, one.sampling.n)

    def step(self) -> None:
        start = time.monotonic()
        new = {r.id for r in self.engine.scheduler.waiting if r.is_new}
        events = self.engine.step()
        for name in new - {r.id for r in self.engine.scheduler.waiting}:
            self.clocks[name].scheduled(start)
        now, count = time.monotonic(), 0
        for event in events:
            if event.token is not None:
                count += 1
                self.clocks[event.request_id].tokens(1, now)
            if event.finish_reason is not None:
                self.clocks.pop(event.request_id).ended(event.finish_reason.value, now)
        self.metrics.step(count, now - start)

    def run(self) -> Samples:
        while self.engine.has_work:
            self.step()
        return Samples(self.metrics)


def prompt(count: int, first: int = 0) -> list[int]:
    return [(first + i) % 251 for i in range(count)]


@pytest.fixture
def driver() -> Driver:
    return Driver(fake_engine())


@pytest.mark.parametrize(("vllm_names", "prefix"), [(False, "quire"), (True, "vllm")])
def test_numbers_of_others_are_read_when_they_are_asked_for(vllm_names: bool, prefix: str) -> None:
    driver, numbers = Driver(fake_engine(), vllm_names), [1, 2]
    driver.metrics.show_gauge("open", "Those that are open.", lambda: numbers[0])
    driver.metrics.show_counter("opened", "Those that were opened.", lambda: numbers[1])
    assert Samples(driver.metrics)(f"{prefix}:open") == 1
    numbers[:] = [0, 3]
    shown = Samples(driver.metrics)
    assert shown(f"{prefix}:open") == 0
    assert shown(f"{prefix}:opened_total") == 3


class TestCounting:
    def test_a_run_of_several_requests(self, driver: Driver) -> None:
        driver.add(request("a", prompt(9), max_tokens=5), request("b", prompt(6, 100), max_tokens=3))
        driver.add(request("c", prompt(4, 50), max_tokens=20, n=2))
        for _ in range(2):
            driver.step()
        during = Samples(driver.metrics)
        assert during("quire:num_requests_running") == 3
        assert during("quire:kv_blocks", state="used") > 0
        assert 0 < during("quire:kv_waste_ratio") < 1
        driver.engine.abort("c")
        shown = driver.run()
        assert {reason: shown("quire:request_success_total", finished_reason=reason) for reason in
                ("stop", "length", "abort", "error")} == {"stop": 0, "length": 2, "abort": 1, "error": 0}  # fmt: skip
        count = shown("quire:request_generation_tokens_sum")
        assert count == shown("quire:generation_tokens_total") == shown("quire:inter_token_latency_seconds_count") + 3
        assert 5 + 3 < count <= 5 + 3 + 4
        assert shown("quire:prompt_tokens_total") == shown("quire:request_prompt_tokens_sum") == 9 + 6 + 4
        assert shown("quire:iteration_tokens_total_sum") == count + 19
        assert shown("quire:request_params_max_tokens_sum") == 28
        assert shown("quire:request_params_n_sum") == 4
        assert shown("quire:time_to_first_token_seconds_count") == 3
        for phase in ("queue", "prefill", "decode", "inference"):
            assert shown(f"quire:request_{phase}_time_seconds_count") == 3
        assert shown("quire:e2e_request_latency_seconds_count") == 3
        assert (shown("quire:num_requests_running"), shown("quire:num_requests_waiting")) == (0, 0)
        assert (shown("quire:kv_cache_usage_perc"), shown("quire:kv_waste_ratio")) == (0, 0)

    def test_moments_become_intervals(self, driver: Driver) -> None:
        clock = driver.metrics.request(10, None, 1)
        start = clock._arrived
        clock.scheduled(start + 1)
        for seconds in (3, 3.25, 4, 4, 6):  # at 4 a guess was right
            clock.tokens(1, start + seconds)
        clock.ended("stop", start + 7)
        shown = Samples(driver.metrics)
        sums = {name: shown(f"quire:{name}_seconds_sum") for name in (
            "time_to_first_token", "inter_token_latency", "request_time_per_output_token", "e2e_request_latency",
            "request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time")}  # fmt: skip
        assert sums == pytest.approx(dict(zip(sums, (3, 3, 0.75, 7, 1, 2, 3, 5), strict=True)))
        assert shown("quire:inter_token_latency_seconds_count") == 3
        assert shown("quire:inter_token_latency_seconds_bucket", le="0.2") == 0
        assert shown("quire:inter_token_latency_seconds_bucket", le="0.3") == 1
        assert shown("quire:inter_token_latency_seconds_bucket", le="+Inf") == 3
        assert shown("quire:request_generation_tokens_sum") == 5
        assert shown("quire:request_max_num_generation_tokens_sum") == 5
        assert shown("quire:request_params_max_tokens_count") == 0

    def test_what_comes_at_one_moment_has_no_time_between_tokens(self, driver: Driver) -> None:
        clock = driver.metrics.request(10, None, 1)
        clock.scheduled(clock._arrived)
        clock.tokens(3, clock._arrived + 1)
        clock.ended("length", clock._arrived + 1)
        shown = Samples(driver.metrics)
        assert shown("quire:request_generation_tokens_sum") == shown("quire:request_max_num_generation_tokens_sum") == 3
        assert shown("quire:request_decode_time_seconds_count") == 1
        for name in ("inter_token_latency", "request_time_per_output_token"):
            assert shown(f"quire:{name}_seconds_count") == 0

    def test_a_search_has_one_clock_for_all_that_it_finds(self, driver: Driver) -> None:
        clock = driver.metrics.request(10, None, 3)
        clock.scheduled(clock._arrived)
        clock.found([4, 9, 2], clock._arrived + 1)
        clock.ended("stop", clock._arrived + 1)
        shown = Samples(driver.metrics)
        assert shown("quire:request_generation_tokens_sum") == 15
        assert shown("quire:request_max_num_generation_tokens_sum") == 9
        assert shown("quire:time_to_first_token_seconds_count") == 1
        assert shown("quire:inter_token_latency_seconds_count") == 0

    @pytest.mark.slow
    def test_a_served_search_is_counted_at_its_end(self) -> None:
        with serving() as server:
            fields = {"use_beam_search": True, "n": 3, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
            answer = server.post("/v1/completions", prompt="import os\n", **fields).json()
            server.on_engine(lambda: None)  # its last step is counted now
            shown = Samples(server.metrics)
        assert answer["usage"]["completion_tokens"] == 18
        for name, value in (("generation_tokens_total", 18), ("request_generation_tokens_sum", 18),
                            ("request_max_num_generation_tokens_sum", 6),
                            ("time_to_first_token_seconds_count", 1)):  # fmt: skip
            assert shown(f"quire:{name}", model_name="quire-embedded") == value

    def test_right_guesses_make_arrivals_fewer_than_tokens(self) -> None:
        driver = Driver(fake_engine(model=circling, speculation=Speculation([PromptLookup()], 5)))
        driver.add(request("a", [i % CIRCLE for i in range(14)], max_tokens=40))
        steps = 0
        while driver.engine.has_work:
            driver.step()
            steps += 1
        shown = driver.run()
        assert steps < 40
        assert shown("quire:inter_token_latency_seconds_count") == steps - 1
        for name in ("generation_tokens_total", "request_generation_tokens_sum",
                     "request_max_num_generation_tokens_sum"):  # fmt: skip
            assert shown(f"quire:{name}") == 40
        assert shown("quire:iteration_tokens_total_sum") == 40 + 14
        mean = shown("quire:request_time_per_output_token_seconds_sum")
        assert mean == pytest.approx(shown("quire:request_decode_time_seconds_sum") / 39)

    def test_what_never_ran_has_no_phases(self, driver: Driver) -> None:
        clock = driver.metrics.request(10, 5, 1)
        clock.ended("abort", clock._arrived + 1)
        shown = Samples(driver.metrics)
        assert shown("quire:request_success_total", finished_reason="abort") == 1
        assert shown("quire:e2e_request_latency_seconds_sum") == pytest.approx(1)
        for name in ("request_queue_time", "request_prefill_time", "request_decode_time", "time_to_first_token"):
            assert shown(f"quire:{name}_seconds_count") == 0

    def test_the_prefix_cache_and_evictions(self) -> None:
        driver = Driver(fake_engine(num_blocks=8))
        driver.add(request("a", prompt(16), max_tokens=1))
        first = driver.run()
        assert (first("quire:prefix_cache_queries_total"), first("quire:prefix_cache_hits_total")) == (16, 0)
        states = ("used", "cached", "free")
        assert [first("quire:kv_blocks", state=state) for state in states] == [0, 4, 4]
        driver.add(request("b", prompt(12) + prompt(4, 100), max_tokens=1))
        second = driver.run()
        assert (second("quire:prefix_cache_queries_total"), second("quire:prefix_cache_hits_total")) == (32, 12)
        assert [second("quire:kv_blocks", state=state) for state in states] == [0, 5, 3]
        driver.add(request("c", prompt(24, 200), max_tokens=1))
        third = driver.run()
        assert third("quire:kv_blocks_evicted_total") == 3
        assert sum(third("quire:kv_blocks", state=state) for state in states) == 8

    def test_copies_preemptions_and_swaps(self) -> None:
        driver = Driver(fake_engine(num_blocks=12, num_host_blocks=24, max_num_seqs=4))
        driver.add(*siblings("s", prompt(6), 2, max_tokens=12, n=2), request("b", prompt(14, 70), max_tokens=20))
        shown = driver.run()
        assert shown("quire:kv_blocks_copied_total") > 0
        assert shown("quire:num_preemptions_total") == driver.engine.scheduler.num_preemptions > 0
        assert shown("quire:kv_blocks_swapped_total", way="out") > 0
        assert shown("quire:kv_blocks_swapped_total", way="in") > 0
        assert shown("quire:kv_host_blocks", state="free") == 24
        assert shown("quire:num_requests_swapped") == 0

    @pytest.mark.slow
    def test_states_and_rows_are_counted_apart(self) -> None:
        groups = (CacheGroup((0,)), StateGroup((1,), piece=4), RowGroup((1,), piece=4))
        sizes = {"num_blocks": 20, "num_host_blocks": 30, "state_pools": StatePools(7, 4, 6)}
        engine = fake_engine(groups=groups, state_snapshot_interval=512, **sizes)
        driver = Driver(engine)
        driver.add(request("a", prompt(6), max_tokens=30))
        shown = driver.run()
        # A state at each fourth token came and went, and none because its memory was needed.
        assert shown("quire:kv_blocks_evicted_total") == 0
        states = ("used", "cached", "free")
        assert [shown("quire:states", state=state) for state in states] == [0, 2, 5]  # at the prompt's end, and its own
        assert [shown("quire:open_pieces", state=state) for state in states] == [0, 0, 4]
        driver.add(*(request(f"r{i}", prompt(6, 70 + i), max_tokens=32) for i in range(4)))
        most = dict.fromkeys(("kv_host_blocks", "host_states", "host_open_pieces"), 0.0)
        while engine.has_work:
            driver.step()
            shown = Samples(driver.metrics)
            for name, pool in zip(most, engine.scheduler.manager.host_pools, strict=True):
                used = shown(f"quire:{name}", state="used")
                assert used == pool.num_used
                assert used + shown(f"quire:{name}", state="free") == pool.num_blocks
                most[name] = max(most[name], used)
        assert min(most["kv_host_blocks"], most["host_states"]) > 0
        assert shown("quire:kv_blocks_evicted_total") > 0

    def test_waste_is_what_the_usage_report_says(self) -> None:
        driver = Driver(fake_engine(block_size=16))
        driver.add(*siblings("s", prompt(6), 3, max_tokens=9, n=3), request("b", prompt(13, 70), max_tokens=9))
        for _ in range(6):
            driver.step()
            usage = driver.engine.scheduler.usage()
            # The report is of what is written: not of each request's newest token, for which there may be a slot.
            shown = round(Samples(driver.metrics)("quire:kv_waste_ratio") * usage.used_slots)
            assert usage.wasted_slots - len(driver.engine.scheduler.running) <= shown <= usage.wasted_slots
            assert shown > 0

    def test_the_heartbeat_ages_only_while_there_is_work(self, driver: Driver) -> None:
        driver.metrics._alive -= 100
        assert Samples(driver.metrics)("quire:engine_heartbeat_age_seconds") == 0
        driver.add(request("a", prompt(9), max_tokens=5))
        assert Samples(driver.metrics)("quire:engine_heartbeat_age_seconds") >= 100
        driver.engine.step()  # told by the blocks that it takes, before any step has ended
        assert Samples(driver.metrics)("quire:engine_heartbeat_age_seconds") < 100


class TestExposition:
    @pytest.mark.parametrize("vllm_names", [False, True])
    def test_both_prefixes_have_vllms_names(self, vllm_names: bool) -> None:
        names = Samples(Metrics(fake_engine(), "a model", vllm_names)).names
        prefix, other = ("vllm:", "quire:") if vllm_names else ("quire:", "vllm:")
        assert {prefix + name for name in VLLM_NAMES} <= names
        assert not any(name.startswith(other) for name in names)
        assert {"process_open_fds", "process_resident_memory_bytes", "python_info"} <= names

    def test_how_the_model_is_stored(self) -> None:
        info = {"dtype": "bfloat16", "quantization": "awq int4", "weight_bytes": "1234", "cache_bits": "16"}
        shown = Samples(Metrics(fake_engine(), "a model", False, info))
        assert shown("quire:model_config_info", **info) == 1
        assert "quire:model_config_info" not in Samples(Metrics(fake_engine(), "a model", False)).names

    def test_histograms_add_up(self, driver: Driver) -> None:
        driver.add(*(request(f"r{i}", prompt(5 + i, 20 * i), max_tokens=3 + i) for i in range(6)))
        shown = driver.run()
        names = [name.removesuffix("_bucket") for name in shown.names if name.endswith("_bucket")]
        assert len(names) == 15
        for name in names:
            bounds, counts = zip(*shown.buckets(name), strict=True)
            assert list(counts) == sorted(counts)
            assert counts[-1] == shown(f"{name}_count") > 0
            each = [b - a for a, b in pairwise([0, *counts])]
            assert sum(map(mul, each, [0, *bounds])) <= shown(f"{name}_sum") <= sum(map(mul, each[:-1], bounds))
        assert [bound for bound, _ in shown.buckets("quire:request_prompt_tokens")] == [
            1, 2, 5, 10, 20, 50, 100, 200, float("inf")]  # fmt: skip

    def test_a_model_name_with_odd_characters(self) -> None:
        metrics = Metrics(fake_engine(), 'a "model"\\ \n漢', False)
        families = text_string_to_metric_families(metrics.render("")[0].decode())
        running = next(family for family in families if family.name == "quire:num_requests_running")
        assert running.samples[0].labels["model_name"] == 'a "model"\\ \n漢'

    def test_openmetrics_for_whom_takes_it(self, driver: Driver) -> None:
        accept = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.4"
        text, content_type = driver.metrics.render(accept)
        assert content_type.startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
        families = list(openmetrics_parser.text_string_to_metric_families(text.decode()))
        assert {"quire:prompt_tokens", "quire:iteration_tokens_total", "quire:kv_blocks"} <= {
            one.name for one in families
        }
        samples = {one.name for family in families for one in family.samples}
        assert {"quire:prompt_tokens_total", "quire:iteration_tokens_total_bucket", "quire:kv_blocks"} <= samples

    @pytest.mark.parametrize(
        "accept", ["", "*/*", "text/plain;version=x", "application/openmetrics-text;version=é\r\nx"]
    )
    def test_odd_accept_headers_do_no_harm(self, driver: Driver, accept: str) -> None:
        text, content_type = driver.metrics.render(accept)
        assert b"quire:num_requests_running" in text
        assert content_type.isascii()
        assert "\n" not in content_type

    def test_nothing_is_registered_for_the_whole_process(self) -> None:
        first, second = Metrics(fake_engine(), "a model", False), Metrics(fake_engine(), "a model", False)
        assert Samples(first).names == Samples(second).names
        assert not any("quire" in name for name in REGISTRY._names_to_collectors)


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads give way to one another a hundred times as often, so that they meet at more places."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 100)
    yield
    sys.setswitchinterval(before)


@pytest.mark.slow
@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_scraping_while_the_engine_steps(num_host_blocks: int, hasty_threads: None, long: bool) -> None:
    """Other threads scrape without a pause while requests come, are preempted, swapped, and end."""
    driver = Driver(fake_engine(num_blocks=24, num_host_blocks=num_host_blocks, max_num_seqs=12))
    stop, seen, errors = threading.Event(), [], []

    def scrape() -> None:
        try:
            while not stop.is_set():
                seen.append(Samples(driver.metrics))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=scrape) for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline, i = time.monotonic() + (0.7 if long else 0.3), 0
    while time.monotonic() < deadline or (len(seen) <= 10 and not errors):
        if len(driver.clocks) < 16:
            driver.add(request(f"r{i}", prompt(5 + i % 30, 7 * i), max_tokens=1 + i % 17))
            i += 1
        driver.step()
    stop.set()
    for thread in threads:
        thread.join()
    last = driver.run()
    assert not errors
    assert driver.engine.scheduler.num_preemptions > 0
    assert len(seen) > 10
    for shown in seen:
        assert sum(shown("quire:kv_blocks", state=state) for state in ("used", "cached", "free")) == 24
        assert 0 <= shown("quire:kv_waste_ratio") <= 1
        assert shown("quire:inter_token_latency_seconds_count") <= last("quire:inter_token_latency_seconds_count")


class TestBoard:
    @staticmethod
    def expressions() -> Iterator[str]:
        board = json.loads(BOARD.read_text())
        yield from (target["expr"] for panel in board["panels"] for target in panel.get("targets", ()))
        yield from (v["definition"] for v in board["templating"]["list"] if v["type"] == "query")

    def test_every_name_is_exposed(self, driver: Driver) -> None:
        names = Samples(driver.metrics).names
        used = {name for e in self.expressions() for name in re.findall(r"\$\{prefix\}:(\w+)", e)}
        assert {f"quire:{name}" for name in used} <= names
        others = {name for e in self.expressions() for name in re.findall(r"\bprocess_\w+", e)}
        assert others <= names
        assert len(used) > 20
        assert not any("quire:" in e or "vllm:" in e for e in self.expressions())  # one board for both prefixes

    def test_every_label_is_exposed(self, driver: Driver) -> None:
        labels = {label for _, labels in Samples(driver.metrics).values for label, _ in labels}
        for e in self.expressions():
            used = set(re.findall(r"by \((\w+)\)", e)) | set(re.findall(r"(\w+)=~", e))
            assert used <= labels | {"instance"}, e  # Prometheus adds this one

    def test_panels_do_not_overlap(self) -> None:
        board = json.loads(BOARD.read_text())
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert not cells & taken, panel["title"]
            assert at["x"] + at["w"] <= 24
            taken |= cells
