"""Files of deploy/ agree with the server, in metrics, flags, variables, ports and paths, and with each other.

`scripts/check-deploy` renders the chart and checks it against the schemas of Kubernetes; this needs no such tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from phonograph import __version__
from phonograph.cli.options import ENGINE_FIELDS, SERVER_FIELDS
from phonograph.config.server_config import ServerConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/phonograph"
TEMPLATES = sorted((CHART / "templates").iterdir())
YAML = sorted({*DEPLOY.rglob("*.y*ml"), *(ROOT / ".github/workflows").glob("*.yml")} - set(TEMPLATES))
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
KSERVE = list(yaml.safe_load_all((DEPLOY / "kserve.yaml").read_text(encoding="utf-8")))
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
ALERTS = DEPLOY / "prometheus/alerts.yml"
PORT = ServerConfig.model_fields["port"].default
USER = 10001
OUR_FLAGS = {f"--{name.replace('_', '-')}" for name in (*ENGINE_FIELDS, *SERVER_FIELDS)}
OTHERS_FLAGS = {
    "Dockerfile": {
        *("--from", "--target", "--index-url", "--interval", "--timeout", "--start-period", "--retries"),
        *("--no-install-recommends", "--uid", "--gid", "--home-dir", "--no-create-home", "--shell"),
        *("--directory", "--owner", "--group", "--mode"),
    },
    "compose.yaml": {"--build", "--wait"},
    "prometheus-adapter.yaml": {"--install"},
    "skypilot.yaml": {"--secret"},
    "NOTES.txt": {"--namespace"},
}
"""Flags of other programs, by file."""
COLLECTED = ("vllm", "phonograph")


def collected_names() -> dict[str, str]:
    """Return the types of the metrics of the server by name, from its test."""
    text = (ROOT / "tests/server/test_metrics.py").read_text(encoding="utf-8")
    return dict(re.findall(r'^    "((?:vllm|phonograph|process)[:_]\w+)": "(\w+)",$', text, flags=re.MULTILINE))


SERIES = {
    name + suffix
    for name, kind in collected_names().items()
    for suffix in {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(kind, ("",))
}
"""Names of the samples that Prometheus gets."""


def asked(text: str) -> set[str]:
    """Return the names of metrics in a text."""
    return set(re.findall(r"\b(?:vllm:|phonograph:|process_)\w+", text))


def queries(path: Path) -> Iterator[str]:
    """Yield the queries of a dashboard, or of rules."""
    if path.suffix == ".json":
        board = json.loads(path.read_text(encoding="utf-8"))
        yield from (target["expr"] for panel in board["panels"] for target in panel["targets"])
        yield from (json.dumps(variable["query"]) for variable in board["templating"]["list"])
        return
    rules = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    yield from (rule["expr"] for group in rules for rule in group["rules"])


@pytest.mark.parametrize("path", [*DASHBOARDS, ALERTS], ids=lambda path: path.name)
def test_queries_ask_for_metrics_that_exist(path: Path) -> None:
    names = {name for query in queries(path) for name in asked(query)}
    assert len(names) > 8 and names - SERIES == set()
    assert "vllm:prompt_tokens_total" in SERIES and "vllm:prompt_tokens" not in SERIES


def test_each_rule_says_what_to_do_about_a_metric_that_exists() -> None:
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    families = {*collected_names(), *SERIES}
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert asked(" ".join(rule["annotations"].values())) <= families
    tested = (DEPLOY / "prometheus/alerts_test.yml").read_text(encoding="utf-8")
    assert [rule["alert"] for rule in group["rules"] if f'"{rule["alert"]}"' not in tested] == []
    assert (CHART / "alerts.yml").resolve() == ALERTS


def test_dashboards_differ_and_are_provisioned() -> None:
    boards = [json.loads(path.read_text(encoding="utf-8")) for path in DASHBOARDS]
    assert [board["uid"] for board in boards] == ["phonograph", "phonograph-vllm"]
    provisioning = DEPLOY / "grafana/provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards/phonograph.yaml").read_text())["providers"]
    assert f"./grafana:{provider['options']['path']}:ro" in COMPOSE["services"]["grafana"]["volumes"]
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in COMPOSE["services"]


def test_autoscaling_reads_a_metric_that_exists() -> None:
    (rule,) = yaml.safe_load((DEPLOY / "helm/prometheus-adapter.yaml").read_text(encoding="utf-8"))["rules"]["custom"]
    assert asked(rule["seriesQuery"]) == asked(rule["name"]["matches"]) == {"vllm:num_requests_waiting"} < SERIES
    assert VALUES["autoscaling"]["metric"] == rule["name"]["as"]


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_yaml_parses_without_double_keys(path: Path) -> None:
    class Strict(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            assert len(keys) == len(set(keys)), keys
            return super().construct_mapping(node, deep)

    assert [document for document in yaml.load_all(path.read_text(encoding="utf-8"), Strict) if document]


@pytest.mark.parametrize(
    "path", [DEPLOY / "Dockerfile", *YAML, *TEMPLATES], ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_flags_and_variables_are_settings(path: Path) -> None:
    if path.parent.name == "workflows":
        return
    text = path.read_text(encoding="utf-8")
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - OTHERS_FLAGS.get(path.name, set())
    assert flags - OUR_FLAGS == set()
    variables = {name.lower() for name in re.findall(r"\bPHONOGRAPH_([A-Z][A-Z_]*[A-Z])\b", text)}
    assert variables - {*ENGINE_FIELDS, *SERVER_FIELDS} == set()


def test_ports_agree() -> None:
    assert f"EXPOSE {PORT}\n" in DOCKERFILE and f"PHONOGRAPH_PORT={PORT}\n" in DOCKERFILE
    assert COMPOSE["services"]["phonograph"]["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    (scrape,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": [f"phonograph:{PORT}"]}]
    assert VALUES["port"] == VALUES["service"]["port"] == PORT
    (container,) = KSERVE[0]["spec"]["containers"]
    assert container["args"][-2:] == ["--port", str(PORT)]
    ports = {container["ports"][0]["containerPort"], *(container[f"{name}Probe"]["httpGet"]["port"] for name in PROBES)}
    assert ports == {PORT}
    sky = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text(encoding="utf-8"))
    assert sky["resources"]["ports"] == PORT and f"--port {PORT}\n" in sky["run"]


PROBES = {"startup": "/health", "liveness": "/health", "readiness": "/ready"}


def test_probes_are_apart() -> None:
    (container,) = KSERVE[0]["spec"]["containers"]
    template = (CHART / "templates/deployment.yaml").read_text(encoding="utf-8")
    for name, path in PROBES.items():
        assert container[f"{name}Probe"]["httpGet"]["path"] == path
        assert re.search(rf"{name}Probe:\n\s+httpGet: {{path: {path}, port: http}}", template)
    assert "'/health'" in DOCKERFILE
    sky = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text(encoding="utf-8"))
    assert sky["service"]["readiness_probe"]["path"] == "/ready"


def test_a_stopped_container_gets_longer_than_the_shutdown_timeout() -> None:
    timeout = ServerConfig.model_fields["shutdown_timeout"].default
    assert int(COMPOSE["services"]["phonograph"]["stop_grace_period"].removesuffix("s")) > timeout
    assert KSERVE[1]["spec"]["predictor"]["terminationGracePeriodSeconds"] > timeout
    template = (CHART / "templates/deployment.yaml").read_text(encoding="utf-8")
    (more,) = re.findall(r"terminationGracePeriodSeconds: {{ add \(int \.Values\.shutdownTimeout\) (\d+) }}", template)
    (pause,) = re.findall(r'command: \[sleep, "(\d+)"\]', template)
    assert int(more) > int(pause)


def test_images_and_stages_agree() -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    assert stages[-2:] == ["cpu", "cuda"]
    gpu = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text(encoding="utf-8"))["services"]["phonograph"]
    for service in (COMPOSE["services"]["phonograph"], gpu):
        assert service["image"] == f"phonograph:{service['build']['target']}" and service["build"]["target"] in stages
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert str(chart["appVersion"]) == __version__
    (container,) = KSERVE[0]["spec"]["containers"]
    assert container["image"] == f"{VALUES['image']['repository']}:{__version__}-{VALUES['device']}"
    images = [service["image"] for name, service in COMPOSE["services"].items() if name != "phonograph"]
    assert not [image for image in images if not re.fullmatch(r"[\w.]+/[\w./-]+:v?\d+\.\d+\.\d+", image)]


def test_containers_are_not_root_and_write_below_the_cache_and_tmp_only() -> None:
    assert DOCKERFILE.count(f"\nUSER {USER}\n") == 2 and f"--uid {USER} " in DOCKERFILE
    written = re.findall(r"\b(?:HOME|XDG_CACHE_HOME|HF_HOME|TRITON_CACHE_DIR|CUDA_CACHE_PATH)=(\S+)", DOCKERFILE)
    assert len(written) == 5 and all(path.startswith("/cache") for path in written)
    service = COMPOSE["services"]["phonograph"]
    assert service["read_only"] and service["tmpfs"] == ["/tmp"] and service["volumes"] == ["cache:/cache"]
    (container,) = KSERVE[0]["spec"]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["runAsUser"] == USER
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/cache", "/tmp"}
    template = (CHART / "templates/deployment.yaml").read_text(encoding="utf-8")
    for line in (f"runAsUser: {USER}", "readOnlyRootFilesystem: true", "mountPath: /cache", "mountPath: /tmp"):
        assert line in template


def test_kubernetes_adds_no_variables_that_are_no_settings() -> None:
    """A service named phonograph would add PHONOGRAPH_PORT=tcp://..., which the server reads as its port."""
    assert "enableServiceLinks: false" in (CHART / "templates/deployment.yaml").read_text(encoding="utf-8")
    assert KSERVE[1]["metadata"]["name"] != "phonograph"


def test_each_value_of_the_chart_is_in_its_schema_and_used() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"]
    assert set(schema) - {"global"} == set(VALUES)
    text = "".join(path.read_text(encoding="utf-8") for path in TEMPLATES)
    assert [name for name in VALUES if f".Values.{name}" not in text] == []
    used = set(re.findall(r"\.Values\.(\w+)", text))
    assert used <= set(VALUES)
    for name, value in VALUES.items():
        if isinstance(value, dict) and (known := schema[name].get("properties")):
            assert set(value) == set(known), name
