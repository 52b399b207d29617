"""What stands in deploy/ for clusters, checked without one: its form, and that its parts fit each other and Quire."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from quire.cache.incoming import Fault
from quire.cli import app
from quire.fleet.membership import DnsMembers, parse_members
from quire.fleet.metrics import REASONS, FleetMetrics
from quire.ray.app import parse
from quire.request import FinishReason
from quire.server.api.local_engine_client import STUCK_AFTER
from quire.server.run import FAREWELL
from quire.server.server_config import HttpConfig
from tests.helm import CHART, PLACED, READY, ROOT, VALUES, VARIANTS, Object, objects_of, pods, ready
from tests.server.serving import serving

jsonschema_rs = pytest.importorskip("jsonschema_rs", reason="schemathesis, which brings jsonschema_rs, is missing")


@pytest.fixture(params=VARIANTS)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return objects_of(request.param)


# ---------------------------------------------------------------------------------------------------- the form
# The fields that are used, and no others: a field that is misspelled is none of them.

TEXT, NUMBER, FLAG = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"}
PORT_NUMBER = {"type": "integer", "minimum": 1, "maximum": 65_535}
PORT = {"anyOf": [PORT_NUMBER, {"type": "string", "pattern": "^[a-z][-a-z0-9]{0,14}$"}]}
TEXTS = {"type": "object", "additionalProperties": TEXT}
SIZE = {"type": "string", "pattern": "^[0-9]+(Mi|Gi|Ti)$"}


def record(required: Mapping[str, Object] | None = None, **optional: Object) -> Object:
    needed = dict(required or {})
    return {
        "type": "object",
        "required": list(needed),
        "properties": needed | optional,
        "additionalProperties": False,
    }


def several(of: Object) -> Object:
    return {"type": "array", "minItems": 1, "items": of}


def an_object(version: str, kind: str, spec: Object) -> Object:
    meta = record({"name": NAME, "labels": TEXTS}, annotations=TEXTS)
    return record({"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": meta, "spec": spec})


AMOUNTS = record({"cpu": NUMBER, "memory": SIZE}, **{"nvidia.com/gpu": {"const": 1}})
PROBE = record(
    httpGet=record({"path": {"enum": ["/health", "/ready"]}, "port": PORT}),
    tcpSocket=record({"port": PORT}),
    periodSeconds=NUMBER,
    timeoutSeconds=NUMBER,
    failureThreshold=NUMBER,
)
ENV = record(
    {"name": {"type": "string", "pattern": "^[A-Za-z_]+$"}},
    value={"type": "string"},
    valueFrom=record(
        secretKeyRef=record({"name": NAME, "key": TEXT}), resourceFieldRef=record({"resource": {"const": "limits.cpu"}})
    ),
)
CONTAINER = record(
    {
        "name": NAME,
        "image": TEXT,
        "resources": record({"requests": AMOUNTS, "limits": AMOUNTS}),
        "securityContext": record(
            {"allowPrivilegeEscalation": {"const": False}, "capabilities": record({"drop": {"const": ["ALL"]}})}
        ),
    },
    command=several(TEXT),
    args=several(TEXT),
    env=several(ENV),
    ports=several(record({"name": NAME, "containerPort": PORT_NUMBER})),
    startupProbe=PROBE,
    readinessProbe=PROBE,
    livenessProbe=PROBE,
    lifecycle=record(preStop=record({"exec": record({"command": several(TEXT)})})),
    volumeMounts=several(record({"name": NAME, "mountPath": TEXT}, readOnly=FLAG)),
)
POD = record(
    {
        "metadata": record({"labels": TEXTS}, annotations=TEXTS),
        "spec": record(
            {
                "containers": several(CONTAINER),
                "enableServiceLinks": {"const": False},
                "securityContext": record(
                    {
                        "runAsNonRoot": {"const": True},
                        "runAsUser": NUMBER,
                        "fsGroup": NUMBER,
                        "seccompProfile": record({"type": {"const": "RuntimeDefault"}}),
                    }
                ),
            },
            terminationGracePeriodSeconds=NUMBER,
            imagePullSecrets=several(record({"name": NAME})),
            nodeSelector=TEXTS,
            tolerations=several({"type": "object"}),
            affinity={"type": "object"},
            volumes=several(
                record(
                    {"name": NAME},
                    secret=record({"secretName": NAME}),
                    emptyDir=record({"sizeLimit": SIZE}),
                    persistentVolumeClaim=record({"claimName": NAME}),
                )
            ),
        ),
    }
)
SELECTOR = record({"matchLabels": TEXTS})
CLAIM = record(
    {
        "metadata": record({"name": NAME}),
        "spec": record(
            {
                "accessModes": {"const": ["ReadWriteOnce"]},
                "resources": record({"requests": record({"storage": SIZE})}),
            }
        ),
    }
)
GROUP = record({"rayStartParams": TEXTS, "template": POD})
WORKERS = record(
    {
        "groupName": NAME,
        "replicas": NUMBER,
        "minReplicas": NUMBER,
        "maxReplicas": NUMBER,
        **GROUP["properties"],
    }
)
SCHEMAS = {
    "Service": an_object(
        "v1",
        "Service",
        record(
            {
                "selector": TEXTS,
                "ports": several(record({"name": NAME, "port": PORT_NUMBER, "targetPort": PORT})),
            },
            clusterIP={"const": "None"},
        ),
    ),
    "StatefulSet": an_object(
        "apps/v1",
        "StatefulSet",
        record(
            {
                "serviceName": NAME,
                "replicas": NUMBER,
                "selector": SELECTOR,
                "template": POD,
                "podManagementPolicy": {"const": "Parallel"},
            },
            volumeClaimTemplates=several(CLAIM),
        ),
    ),
    "Deployment": an_object(
        "apps/v1", "Deployment", record({"replicas": NUMBER, "selector": SELECTOR, "template": POD})
    ),
    "PodDisruptionBudget": an_object(
        "policy/v1", "PodDisruptionBudget", record({"maxUnavailable": NUMBER, "selector": SELECTOR})
    ),
    "NetworkPolicy": an_object(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        record(
            {
                "podSelector": SELECTOR,
                "policyTypes": {"const": ["Ingress"]},
                "ingress": several(
                    {
                        **record(
                            {},
                            **{
                                "from": several(
                                    record({"podSelector": SELECTOR}, namespaceSelector={"type": "object"}),
                                ),
                                "ports": several(record({"port": PORT_NUMBER})),
                            },
                        ),
                        "minProperties": 1,
                    }
                ),
            }
        ),
    ),
    "Ingress": an_object(
        "networking.k8s.io/v1",
        "Ingress",
        record(
            {"rules": several(record({"host": TEXT, "http": {"type": "object"}}))},
            ingressClassName=TEXT,
            tls=several(record({"hosts": several(TEXT), "secretName": NAME})),
        ),
    ),
    "PodMonitor": an_object(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        record(
            {
                "jobLabel": TEXT,
                "selector": SELECTOR,
                "podMetricsEndpoints": several(
                    record(
                        {"port": NAME, "path": {"const": "/metrics"}, "interval": TEXT},
                        authorization=record({"credentials": record({"name": NAME, "key": TEXT})}),
                    )
                ),
            }
        ),
    ),
    "PrometheusRule": an_object(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        record(
            {
                "groups": several(
                    record(
                        {
                            "name": TEXT,
                            "rules": several(
                                record(
                                    {"alert": TEXT, "expr": TEXT, "labels": TEXTS, "annotations": TEXTS},
                                    **{"for": TEXT},
                                )
                            ),
                        }
                    )
                )
            }
        ),
    ),
    "RayService": an_object(
        "ray.io/v1",
        "RayService",
        record(
            {
                "serveConfigV2": TEXT,
                "rayClusterConfig": record(
                    {
                        "rayVersion": TEXT,
                        "enableInTreeAutoscaling": {"const": True},
                        "authOptions": record({"mode": {"const": "token"}}),
                        "headGroupSpec": GROUP,
                        "workerGroupSpecs": several(WORKERS),
                    },
                    gcsFaultToleranceOptions=record(
                        {"redisAddress": TEXT},
                        redisPassword=record(
                            {"valueFrom": record({"secretKeyRef": record({"name": NAME, "key": TEXT})})}
                        ),
                    ),
                ),
            }
        ),
    ),
}


def test_every_object_has_only_fields_that_its_kind_knows(objects: list[Object]) -> None:
    for each in objects:
        errors = [
            f"{'/'.join(map(str, error.instance_path))}: {error.message}"
            for error in jsonschema_rs.validator_for(SCHEMAS[each["kind"]]).iter_errors(each)
        ]
        assert not errors, (each["kind"], errors)


def test_the_kinds_are_those_that_are_wanted() -> None:
    assert [each["kind"] for each in objects_of("plain")] == [
        *("Service", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy", "Deployment", "PodDisruptionBudget"),
        "Service",
    ]
    assert [each["kind"] for each in objects_of("ray")] == ["RayService", "NetworkPolicy", "NetworkPolicy", "Service"]


@pytest.mark.parametrize("name", READY)
def test_the_files_for_those_without_helm_are_what_the_chart_makes(name: str) -> None:
    assert (ROOT / "deploy" / name).read_text() == ready(name), "run: python -m tests.helm"


def test_helm_itself_makes_the_same() -> None:
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("this machine has no helm")
    for variant, values in VARIANTS.items():
        release = "quire" if "other" not in variant else "mine"
        command = [helm, "template", release, str(CHART), "--values", "-"]
        made = subprocess.run(command, input=json.dumps(VALUES | values), capture_output=True, text=True, check=True)
        found = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(made.stdout) if each}
        assert found == {(each["kind"], each["metadata"]["name"]): each for each in objects_of(variant)}


# ------------------------------------------------------------------------------------------------- the chart's values


def test_the_values_are_what_the_schema_wants() -> None:
    schema = jsonschema_rs.validator_for(json.loads((CHART / "values.schema.json").read_text()))
    for values in VARIANTS.values():
        assert not [error.message for error in schema.iter_errors(VALUES | values)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"engine": "nomad"},
        {"motor": "ray"},
        {"options": {"max-num-seqs": 64}},  # Helm would write a large number as 1e+06
        {"options": {"max_num_seqs": "64"}},
        {"options": {"fleet-secret": "1234"}},
        {"options": {"port": "9"}},
        {"replicas": VALUES["replicas"] | {"count": 0}},
        {"replicas": VALUES["replicas"] | {"cpu": 0.5}},  # whole cores
        {"replicas": VALUES["replicas"] | {"memory": 8}},
        {"replicas": VALUES["replicas"] | {"count": 257}},
        {"port": 0},
        {"secretName": "Quire Fleet"},
        {"head": VALUES["head"] | {"redisAddress": "http://redis:6379"}},
        {"head": VALUES["head"] | {"redisAddress": "redis"}},
        {"options": {"lora": []}},
        {"options": {"drain-grace": "9"}},
        {"replicas": VALUES["replicas"] | {"extraEnv": {"HF_HOME": "/x"}}},
        {"replicas": VALUES["replicas"] | {"gpu": "2"}},
        {"engine": "ray", "replicas": VALUES["replicas"] | {"gpu": "nvidia.com/gpu"}},  # Ray would hide it
        {"engine": "ray", "gateways": VALUES["gateways"] | {"keysSecretName": "keys"}},
        {"monitoring": VALUES["monitoring"] | {"interval": "often"}},
    ],
)
def test_values_that_cannot_be_are_refused(wrong: Object) -> None:
    schema = jsonschema_rs.validator_for(json.loads((CHART / "values.schema.json").read_text()))
    assert not schema.is_valid(VALUES | wrong)


# --------------------------------------------------------------------------------------------------- what fits what


def containers(objects: list[Object]) -> list[Object]:
    return [one for pod in pods(objects) for one in pod["spec"]["containers"]]


def selected(objects: list[Object], labels: Mapping[str, str]) -> list[Object]:
    """The pods that have these labels."""
    return [pod for pod in pods(objects) if labels.items() <= pod["metadata"]["labels"].items()]


def components(found: list[Object]) -> set[str]:
    return {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in found}


def test_each_selector_finds_the_pods_that_it_is_for(objects: list[Object]) -> None:
    for each in objects:
        spec, labels = each["spec"], each["metadata"]["labels"]
        if each["kind"] == "Service":
            wanted = spec["selector"]
        elif each["kind"] == "NetworkPolicy":
            wanted = spec["podSelector"]["matchLabels"]
        elif "selector" in spec:
            wanted = spec["selector"]["matchLabels"]
        else:
            continue
        found = selected(objects, wanted)
        component = labels.get("app.kubernetes.io/component")
        assert components(found) == ({component} if component else components(list(pods(objects))))
        if "template" in spec:
            assert spec["template"] in found


def test_services_and_probes_name_ports_that_there_are(objects: list[Object]) -> None:
    for each in objects:
        if each["kind"] == "Service":
            for pod in selected(objects, each["spec"]["selector"]):
                named = {port["name"] for one in pod["spec"]["containers"] for port in one["ports"]}
                assert {port["targetPort"] for port in each["spec"]["ports"]} <= named
    for one in containers(objects):
        named = {port["name"] for port in one.get("ports", ())}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            for how in one.get(kind, {}).values():
                assert not isinstance(how, dict) or how["port"] in named


def test_each_container_has_whole_cores_of_its_own(objects: list[Object]) -> None:
    for one in containers(objects):
        assert one["resources"]["requests"] == one["resources"]["limits"]


def test_the_secret_is_named_and_never_written(objects: list[Object], request: pytest.FixtureRequest) -> None:
    variant = request.node.callspec.params["objects"]
    name = (VALUES | VARIANTS[variant])["secretName"]
    for pod in pods(objects):
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        [one] = pod["spec"]["containers"]
        from_env = [env["valueFrom"]["secretKeyRef"] for env in one.get("env", ()) if "SECRET" in env["name"]]
        from_file = [v["secret"] for v in pod["spec"].get("volumes", ()) if v["name"] == "secret"]
        if component == "head":
            assert not from_env + from_file
        else:
            assert [*from_env, *from_file] in ([{"name": name, "key": "secret"}], [{"secretName": name}])
        assert not [argument for argument in one.get("args", ()) if argument.startswith("--fleet-secret")]


def test_what_is_mounted_is_there(objects: list[Object]) -> None:
    for each in objects:
        claims = {claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", ())}
        for pod in pods([each]):
            volumes = claims | {volume["name"] for volume in pod["spec"].get("volumes", ())}
            mounted = {mount["name"] for one in pod["spec"]["containers"] for mount in one.get("volumeMounts", ())}
            assert mounted == volumes


# -------------------------------------------------------------------------------------------- what fits Quire


def known_options(command: str) -> dict[str, Any]:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {name: each for each in commands[command].params for name in each.opts}


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("plain")])
def test_every_option_is_one_of_the_command(variant: str) -> None:
    started = set()
    for one in containers(objects_of(variant)):
        program, command = one["command"]
        assert program == "quire"
        started.add(command)
        for argument in one["args"]:
            name, _, value = argument.partition("=")
            assert name in known_options(command), f"quire {command} has no {name}"
            assert bool(value) is not getattr(known_options(command)[name], "is_flag", False)
            if name == "--port":
                assert int(value) in [port["containerPort"] for port in one["ports"]]
        variables = {each.envvar for each in known_options(command).values()}
        assert {env["name"] for env in one["env"] if env["name"].startswith("QUIRE_")} <= variables
    assert started == {"serve", "fleet"}


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("plain")])
def test_the_gateway_looks_up_the_service_of_the_replicas(variant: str) -> None:
    objects = objects_of(variant)
    [gateway] = [one for one in containers(objects) if one["name"] == "gateway"]
    [replicas] = [argument.partition("=")[2] for argument in gateway["args"] if argument.startswith("--replicas")]
    assert isinstance(parse_members(replicas), DnsMembers)
    [service] = [each for each in objects if each["spec"].get("clusterIP") == "None"]
    assert replicas == f"dns://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    [replica] = [each for each in objects if each["kind"] == "StatefulSet"]
    assert replica["spec"]["serviceName"] == service["metadata"]["name"]


def test_values_reach_the_pods_that_they_are_for() -> None:
    objects = objects_of("plain, other values")
    for pod in pods([*objects, *objects_of("ray, other values")]):
        assert pod["metadata"]["annotations"] == PLACED["podAnnotations"]
        assert (
            pod["spec"].items() >= {name: PLACED[name] for name in ("nodeSelector", "tolerations", "affinity")}.items()
        )
    replica, gateway = containers(objects)
    assert all(pod["spec"]["imagePullSecrets"] == [{"name": "registry"}] for pod in pods(objects))
    assert replica["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {"--device=cuda", "--reproducible", "--lora=x=/x", '--lora=y="/y z"'} <= {*replica["args"]}
    assert {"name": "QUIRE_DTYPE", "value": "bfloat16"} in replica["env"]
    assert {"name": "QUIRE_ACCESS_LOG", "value": "false"} in gateway["env"]
    for one in (replica, next(one for one in containers(objects_of("ray, other values")) if one["name"] == "quire")):
        [token] = [env for env in one["env"] if env["name"] == "HF_TOKEN"]
        assert token["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    claims = [
        v["persistentVolumeClaim"]
        for pod in pods(objects)
        for v in pod["spec"].get("volumes", ())
        if v["name"] == "cache"
    ]
    assert claims == [{"claimName": "models"}]
    [ingress] = [each for each in objects if each["kind"] == "Ingress"]
    [service] = [each for each in objects if each["kind"] == "Service" and "clusterIP" not in each["spec"]]
    [path] = ingress["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"]["name"] == service["metadata"]["name"]
    assert path["backend"]["service"]["port"]["name"] in [port["name"] for port in service["spec"]["ports"]]


def test_prometheus_can_read_what_it_is_told_to() -> None:
    """It names ports that there are, sends a key that the gateways know, and the policy lets it in."""
    for variant, monitored in (("plain, other values", {"gateway", "replica"}), ("ray, other values", {"gateway"})):
        objects = objects_of(variant)
        monitors = [each for each in objects if each["kind"] == "PodMonitor"]
        assert {each["metadata"]["labels"]["app.kubernetes.io/component"] for each in monitors} == monitored
        for each in monitors:
            [endpoint] = each["spec"]["podMetricsEndpoints"]
            for pod in selected(objects, each["spec"]["selector"]["matchLabels"]):
                assert pod["metadata"]["labels"][each["spec"]["jobLabel"]] == "quire"  # the job of the rules
                [one] = pod["spec"]["containers"]
                assert endpoint["port"] in [port["name"] for port in one["ports"]]
    objects = objects_of("plain, other values")
    [gateway] = [pod for pod in pods(objects) if pod["spec"]["containers"][0]["name"] == "gateway"]
    [file] = [
        arg.partition("=")[2] for arg in gateway["spec"]["containers"][0]["args"] if arg.startswith("--api-key-file")
    ]
    [mount] = gateway["spec"]["containers"][0]["volumeMounts"]
    [volume] = gateway["spec"]["volumes"]
    assert file == f"{mount['mountPath']}/keys"
    [key] = [
        one["authorization"]
        for each in objects
        if each["kind"] == "PodMonitor"
        for one in each["spec"]["podMetricsEndpoints"]
        if "authorization" in one
    ]
    assert key == {"credentials": {"name": volume["secret"]["secretName"], "key": "metrics"}}
    [policy] = [each for each in objects if each["kind"] == "NetworkPolicy"]
    assert {"from": VALUES["monitoring"]["from"], "ports": [{"port": 8000}]} in policy["spec"]["ingress"]


def test_a_pod_has_the_time_that_its_server_may_take_to_end() -> None:
    objects = objects_of("plain")
    for pod in pods(objects):
        [one] = pod["spec"]["containers"]
        given = dict(argument.removeprefix("--").split("=", 1) for argument in one["args"])
        config = HttpConfig()
        grace = float(given.get("drain-grace", config.drain_grace))
        takes = grace + float(given.get("shutdown-timeout", config.shutdown_timeout)) + FAREWELL
        assert takes + (5 if "lifecycle" in one else 0) <= pod["spec"]["terminationGracePeriodSeconds"]
        probe = one["readinessProbe"]
        if one["name"] == "gateway":  # clients come through a Service, which has to notice first
            assert probe["httpGet"]["path"] == "/ready"
            assert probe["periodSeconds"] * probe["failureThreshold"] < grace


def test_the_unit_of_systemd_starts_a_server_and_gives_it_time_to_end() -> None:
    text = (ROOT / "deploy" / "systemd" / "quire.service").read_text()
    unit = dict(line.split("=", 1) for line in text.splitlines() if re.match(r"\w+=", line))
    assert unit["ExecStart"].split() == ["/opt/quire/bin/quire", "serve"]
    config = HttpConfig()
    assert int(unit["TimeoutStopSec"]) > config.drain_grace + config.shutdown_timeout + FAREWELL + STUCK_AFTER
    assert unit["KillMode"] == "mixed"  # else its processes for templates would end before its requests
    assert int(unit["SuccessExitStatus"]) == 128 + signal.SIGTERM


def test_alerts_are_about_metrics_and_reasons_that_there_are(tmp_path: Path) -> None:
    text = (CHART / "rules.yml").read_text()
    with serving({"kv_disk": str(tmp_path)}, fleet_secret="s") as server:
        shown = server.get("/metrics").body.decode() + FleetMetrics().render("")[0].decode()
    known = set(re.findall(r"^# TYPE (\S+) ", shown, re.MULTILINE)) | set(
        re.findall(r"^([a-z_:]+)[{ ]", shown, re.MULTILINE)
    )
    assert not set(re.findall(r"quire:[a-z_]+", text)) - known
    codes = {code for path in (ROOT / "src").rglob("*.py") for code in re.findall(r'code="(\w+)"', path.read_text())}
    reasons = {one for found in re.findall(r'reason!?=~?"([\w|]+)"', text) for one in found.split("|")}
    assert reasons <= codes | {*REASONS} | {fault.value for fault in Fault} | {reason.value for reason in FinishReason}
    [rules] = [each for each in objects_of("plain, other values") if each["kind"] == "PrometheusRule"]
    assert rules["spec"] == yaml.safe_load(text)
    prometheus = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    assert [(ROOT / "deploy" / "prometheus" / path).resolve() for path in prometheus["rule_files"]] == [
        CHART / "rules.yml"
    ]
    assert [scrape["job_name"] for scrape in prometheus["scrape_configs"]] == re.findall(r'job="(\w+)"', text)
    tests = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules_test.yml").read_text())["tests"]
    fired = {name for test in tests for name in re.findall(r'alertname="(\w+)"', str(test["promql_expr_test"]))}
    assert fired == set(re.findall(r"- alert: (\w+)", text))


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("ray")])
def test_serves_config_is_one_that_the_application_takes(variant: str) -> None:
    [service] = [each for each in objects_of(variant) if each["kind"] == "RayService"]
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    [application] = config["applications"]
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    found = parse(application["args"])
    fleet, values = found.fleet, VALUES | VARIANTS[variant]
    assert fleet.bounds() == (values["replicas"]["count"], values["replicas"]["maxCount"])
    assert found.replica == {name.replace("-", "_"): value for name, value in values["options"].items()}
    assert found.gateway == {}
    cluster = service["spec"]["rayClusterConfig"]
    workers = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    [replica] = workers["replicas"]["template"]["spec"]["containers"]
    assert replica["resources"]["limits"]["cpu"] == fleet.num_cpus  # one a pod
    assert (workers["replicas"]["minReplicas"], workers["replicas"]["maxReplicas"]) == fleet.bounds()
    [gateway] = workers["gateways"]["template"]["spec"]["containers"]
    assert gateway["ports"][0]["containerPort"] == fleet.gateway_port
    assert workers["gateways"]["replicas"] == fleet.gateways
    given = json.loads(json.loads(workers["gateways"]["rayStartParams"]["resources"].strip("'")))
    assert given == {fleet.gateway_resource: 1}
    for one in (replica, gateway):
        [mount] = [mount for mount in one["volumeMounts"] if mount["name"] == "secret"]
        assert fleet.secret_file == f"{mount['mountPath']}/secret"


def test_the_head_keeps_what_it_knows_in_a_redis_that_is_named() -> None:
    for variant, expected in (("ray", None), ("ray, other values", "redis:6379")):
        [service] = [each for each in objects_of(variant) if each["kind"] == "RayService"]
        found = service["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions")
        assert (found and found["redisAddress"]) == expected
    assert found["redisPassword"]["valueFrom"]["secretKeyRef"]["name"] == "redis"


def test_the_versions_are_those_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    [version] = re.findall(r'^version = "(.*)"$', project, re.MULTILINE)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version
    assert VALUES["image"] == f"quire:{version}"
    [floor] = re.findall(r'"ray\[serve\]>=([\d.]+),<', project)
    [service] = [each for each in objects_of("ray") if each["kind"] == "RayService"]
    assert service["spec"]["rayClusterConfig"]["rayVersion"].startswith(floor)


def test_the_program_before_a_stop_asks_the_replica_to_drain() -> None:
    [replica] = [one for one in containers(objects_of("plain")) if "lifecycle" in one]
    [program, flag, source] = replica["lifecycle"]["preStop"]["exec"]["command"]
    assert (program, flag) == ("python", "-c")
    asked: list[tuple[str, str | None, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, self.headers["Authorization"], self.headers["Content-Type"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert source.count(":8000/") == 1
        local = source.replace(":8000/", f":{server.server_port}/")
        subprocess.run(
            [sys.executable, "-c", local], env=os.environ | {"QUIRE_FLEET_SECRET": "s3cret"}, check=True, timeout=30
        )
        thread.join()
    assert asked == [("/fleet/drain", "Bearer s3cret", "application/json")]


def test_the_image_for_ray_is_built_from_that_of_the_server() -> None:
    text = (ROOT / "Containerfile").read_text()
    stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", text, re.MULTILINE)
    assert stages[-2:] == [("serve", "ray"), ("serve", "")]  # what is built if no stage is named comes last
    ray = text.partition("AS ray\n")[2].partition("\nFROM")[0]
    assert "quire[ray]" in ray
    assert "wget" in ray  # the operator's probes use it
