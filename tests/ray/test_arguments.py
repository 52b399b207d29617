"""The arguments of the application, from a command line and from YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.ray.app import Arguments, FleetConfig, ReplicaDeployment, parse, read_secret


def test_without_arguments_there_is_one_replica_of_the_embedded_model() -> None:
    found = parse({})
    assert found == Arguments(FleetConfig(), {}, {})
    assert found.fleet.bounds() == (1, 1)


def test_texts_of_a_command_line_are_what_yaml_says_with_types() -> None:
    texts = {"replicas": "2..8", "num_cpus": "4", "gateways": "2", "gateway_port": "9000", "max-num-seqs": "64"}
    typed = {"replicas": "2..8", "num_cpus": 4, "gateways": 2, "gateway_port": 9000, "max_num_seqs": "64"}
    assert parse(texts) == parse(typed)
    found = parse(texts)
    assert found.fleet == FleetConfig(replicas="2..8", num_cpus=4.0, gateways=2, gateway_port=9000)
    assert found.fleet.bounds() == (2, 8)
    assert found.replica == {"max_num_seqs": "64"}
    assert parse({"replicas": 3}).fleet.bounds() == (3, 3)


def test_options_go_to_the_command_that_has_them() -> None:
    """And of those that both have, only the keys of clients to both."""
    served = {"model": "a/b", "kv_cache_memory": "4GiB", "enable_prefix_caching": False}
    gateway = {"resume": "any", "patience": "2.5", "max-body-size": "4096", "enable-log-requests": "true"}
    found = parse(served | gateway | {"api-key": ["k", "l"], "replicas": 2})
    assert found.replica == served | {"api_key": ("k", "l")}
    typed = {"resume": "any", "patience": 2.5, "max_body_size": 4096, "enable_log_requests": True}
    assert found.gateway == typed | {"api_key": ("k", "l")}
    assert parse({"api_key": "k"}).gateway == {"api_key": ("k",)}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"replica": 2}, "there is no argument 'replica'; did you mean 'replicas'?"),
        ({"max-num-seq": 2}, "did you mean 'max_num_seqs'?"),
        ({"xyzzy": 2}, "there is no argument 'xyzzy'; see quire serve --help and quire fleet --help"),
        ({"port": 8000}, "port is given; give gateway_port; a replica takes a free one"),
        ({"host": "0.0.0.0"}, "host is given; give gateway_host"),
        ({"fleet-secret": "s3cret"}, "fleet_secret is given; give secret_file, a file that holds it"),
        ({"resume": "perhaps"}, "resume is 'perhaps'; it must be one of 'exact', 'any', 'never'"),
        ({"patience": "long"}, "patience is 'long'; it must be a number"),
        ({"enable_log_requests": "maybe"}, "enable_log_requests is 'maybe'; it must be True or False"),
        ({"replicas": "many"}, "replicas is 'many'; it must be a number from 1 on, or two as in '1..8'"),
        ({"replicas": "0"}, "replicas is '0'"),
        ({"replicas": "3..2"}, "replicas is '3..2'"),
        ({"replicas": "1.."}, "replicas is '1..'"),
        ({"replicas": "..3"}, "replicas is '..3'"),
        ({"replicas": "-1"}, "replicas is '-1'"),
        ({"num_cpus": "all"}, "num_cpus is 'all'; it must be a number"),
        ({"num_cpus": 0}, "num_cpus is 0.0"),
        ({"num_cpus": "nan"}, "num_cpus is nan"),
        ({"gateways": 0}, "gateways is 0; it must be at least 1"),
        ({"gateway_port": 70000}, "gateway_port is 70000"),
    ],
)
def test_what_is_wrong_is_said(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(args)
    assert words in str(caught.value)


def test_a_secret_is_given_or_stands_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("from the file\n")
    assert read_secret("given", "") == "given"
    assert read_secret("", str(path)) == "from the file"
    path.write_text(" \n")
    with pytest.raises(ConfigError, match="is empty; it must hold the fleet's secret"):
        read_secret("", str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret("", str(tmp_path / "none"))


def test_no_request_can_be_made_of_a_replica_through_ray() -> None:
    """What a handle can call: the address, and what Ray itself asks for. So no request waits for Ray's router."""
    methods = {name for name in vars(ReplicaDeployment) if not name.startswith("_")}
    assert methods == {"url", "check_health", "record_routing_stats", "record_autoscaling_stats"}
