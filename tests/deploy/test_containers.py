"""The image, the compose file and the Kubernetes manifests, as far as that is possible without an engine: linters and
schemas, and everything in them that Custody itself knows, such as commands, variables, ports and paths."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

from custody import config
from custody.cli.app import command, split
from custody.http.app import OPERATIONS
from custody.model.server_settings import ServerSettings
from custody.monitoring.listening import health_page

pytestmark = pytest.mark.req("X13")

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
YAML = sorted([*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml")])
DOCKERFILE = (DEPLOY / "Dockerfile").read_text("utf-8")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
MANIFESTS = [
    document
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    if path.name != "kustomization.yaml"
    for document in yaml.safe_load_all(path.read_text("utf-8"))
]
OURS = {name: service for name, service in COMPOSE["services"].items() if "custody" in service["image"]}
PINNED = re.compile(r"([a-z0-9-]+/)?[a-z0-9-]+:v?\d+\.\d+[\w.-]*")
"""A name, at most one namespace and no host of a registry, and a version of at least two numbers."""
SPARK_CLASSES = {"org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"}


@pytest.fixture(autouse=True)
def mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find the files that are mounted into their directory."""
    monkeypatch.chdir(ROOT / "examples")


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for document in MANIFESTS:
        if document["kind"] in ("Deployment", "Job"):
            yield document["metadata"]["name"], document["spec"]["template"]["spec"]


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    return dict(only)


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The values of a command line of Custody; a usage error if it has none."""
    front, rest = split(arguments)
    current: Any = command()
    context = current.make_context("custody", [*front, *rest])
    while hasattr(current, "commands"):
        name, current, left = current.resolve_command(context, [*context._protected_args, *context.args])
        context = current.make_context(name, left, parent=context)
    return dict(context.params)


def commands() -> Iterator[tuple[str, list[str]]]:
    for name, service in OURS.items():
        if "entrypoint" not in service:
            yield f"compose {name}", service["command"]
    for name, pod in pods():
        yield f"kubernetes {name}", container(pod)["args"]
    for number, found in enumerate(re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)):
        if '"--help"' not in found:
            yield f"image {number}", yaml.safe_load(found)


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_one_of_ours(name: str) -> None:
    values = parsed(COMMANDS[name])
    if "host" in values:
        assert values["host"] == "0.0.0.0", "nobody reaches a server on the loopback of a container"
    if values.get("metrics_port"):
        assert values["metrics_host"] == "0.0.0.0"


def test_a_command_that_does_not_exist_would_be_noticed() -> None:
    for wrong in (["serve", "--hots", "0.0.0.0"], ["works", "app.py"], ["work"], ["migrate", "--wait", "soon"]):
        with pytest.raises(Exception, match=r"(?i)no such|missing|not a duration|soon"):
            parsed(wrong)


def variables() -> Iterator[tuple[str, str]]:
    for name, service in OURS.items():
        for variable in service.get("environment", {}):
            yield f"compose {name}", variable
    for name, pod in pods():
        for one in container(pod).get("env", []):
            yield f"kubernetes {name}", one["name"]


def test_every_variable_is_read() -> None:
    text = (Path(config.__file__)).read_text("utf-8")
    known = set(re.findall(r"\bCUSTODY_[A-Z_]+", text)) | {"PGPASSWORD"}
    found = set(variables())
    assert {variable for _, variable in found} == {"CUSTODY_DATABASE", "PGPASSWORD"}
    assert {variable for _, variable in found} <= known


def test_the_files_are_well_formed() -> None:
    relaxed = (
        "{extends: default, rules: {line-length: {max: 200}, document-start: disable, "
        "braces: {max-spaces-inside: 0}, comments: {min-spaces-from-content: 1}}}"
    )
    run([sys.executable, "-m", "yamllint", "--strict", "-d", relaxed, *map(str, YAML)])


def test_the_image_has_no_findings() -> None:
    run([str(Path(sys.executable).parent / "hadolint"), "--no-color", str(DEPLOY / "Dockerfile")])


def run(arguments: list[str]) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_manifests_are_what_kubernetes_knows() -> None:
    for document in MANIFESTS:
        kubernetes_validate.validate(document, "1.32", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**MANIFESTS[-1], "spce": {}}, "1.32", strict=True)


def test_images_are_pinned_and_from_no_registry_of_their_own() -> None:
    images = {service["image"] for service in COMPOSE["services"].values()}
    images |= set(re.findall(r"^FROM (\S+:\S+)", DOCKERFILE, re.MULTILINE))
    custom = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text("utf-8"))
    tags = {one["name"]: f"{one['name']}:{one['newTag']}" for one in custom["images"]}
    images |= set(tags.values())
    assert [image for image in images if not PINNED.fullmatch(image)] == []
    assert {container(pod)["image"] for _, pod in pods()} == set(tags), "each image has its tag in one place"
    files = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(custom["resources"]) == files


def test_nobody_is_root() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    for stage in stages:
        if "ENTRYPOINT" in stage:
            assert re.findall(r"^USER (\d+)$", stage, re.MULTILINE)[-1] == "10001"
    for name, service in OURS.items():
        assert service["user"] == "10001", name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
    for name, pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] == 10001, name
        assert pod["automountServiceAccountToken"] is False, name
        own = container(pod)["securityContext"]
        assert own["readOnlyRootFilesystem"] is True, name
        assert own["allowPrivilegeEscalation"] is False, name
        assert own["capabilities"] == {"drop": ["ALL"]}, name


def test_ports_are_those_that_commands_listen_on() -> None:
    assert f"EXPOSE {ServerSettings().port}" in DOCKERFILE
    for name, pod in pods():
        only = container(pod)
        ports = {port["name"]: port["containerPort"] for port in only.get("ports", [])}
        values = parsed(only["args"])
        listens = {values.get("port"), values.get("health_port"), values.get("metrics_port")} - {None}
        assert set(ports.values()) == listens, name
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if probe in only:
                at = only[probe]["httpGet"]
                assert ports[at["port"]] in (values.get("port"), values.get("health_port"))
    for name in ("worker", "pipeline"):
        values = parsed(OURS[name]["command"])
        assert f"{name}:{values['metrics_port']}" in scraped()["custody-processes"]
    assert scraped()["custody"] == [f"serve:{ServerSettings().port}"]
    assert OURS["serve"]["ports"] == [f"127.0.0.1:8080:{ServerSettings().port}"]


def scraped() -> dict[str, list[str]]:
    jobs = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text("utf-8"))["scrape_configs"]
    return {job["job_name"]: [at for one in job["static_configs"] for at in one["targets"]] for job in jobs}


def test_probes_ask_for_paths_that_exist() -> None:
    assert callable(health_page)
    paths = {operation.path for operation in OPERATIONS} | {"/healthz", "/readyz"}
    asked = {
        container(pod)[probe]["httpGet"]["path"]
        for _, pod in pods()
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
        if probe in container(pod)
    }
    assert asked == {"/healthz", "/readyz"} <= paths
    checks = [*re.findall(r"http://[^']+", DOCKERFILE)]
    checks += re.findall(r"http://[^']+", str([service.get("healthcheck") for service in OURS.values()]))
    assert checks
    for check in checks:
        assert urlsplit(check).path == "/healthz"
        assert urlsplit(check).port in {8080, parsed(OURS["worker"]["command"])["health_port"]}


def test_they_stop_no_sooner_than_custody_does() -> None:
    for name, pod in pods():
        only = container(pod)
        values = parsed(only["args"])
        if "grace" in values:
            pause = only.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            assert pod["terminationGracePeriodSeconds"] > 30 + pause, name
    for name in ("serve", "worker"):
        assert int(COMPOSE["services"][name]["stop_grace_period"].rstrip("s")) > 30


def test_secrets_are_only_referred_to() -> None:
    assert [document["kind"] for document in MANIFESTS if document["kind"] == "Secret"] == []
    for document in MANIFESTS:
        for url in re.findall(r"postgresql://[^\s'\"]+", yaml.safe_dump(document)):
            assert urlsplit(url).password is None
    for url in re.findall(r"postgresql://[^\s'\"]+\$\{\w+", (DEPLOY / "compose.yaml").read_text("utf-8")):
        assert ":${" in url, "the password comes from the environment"
    passwords = re.findall(r"PASSWORD: (.*)", (DEPLOY / "compose.yaml").read_text("utf-8"))
    assert passwords
    assert [one for one in passwords if not one.startswith("${")] == []


def test_what_belongs_together_has_the_same_names() -> None:
    by_kind: dict[str, list[Any]] = {}
    for document in MANIFESTS:
        by_kind.setdefault(document["kind"], []).append(document)
    labels = {one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"] for one in by_kind["Deployment"]}
    for deployment in by_kind["Deployment"]:
        assert deployment["spec"]["selector"]["matchLabels"] == labels[deployment["metadata"]["name"]]
    for budget in by_kind["PodDisruptionBudget"]:
        assert budget["spec"]["selector"]["matchLabels"] == labels[budget["metadata"]["name"]]
    assert {one["metadata"]["name"] for one in by_kind["PodDisruptionBudget"]} == set(labels)
    for service in by_kind["Service"]:
        assert service["spec"]["selector"] in labels.values()
    (given,) = by_kind["ConfigMap"]
    keys = {one["valueFrom"]["configMapKeyRef"]["key"] for _, pod in pods() for one in container(pod)["env"][:1]}
    assert keys == set(given["data"])


def test_files_and_services_that_are_named_exist() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
            else:
                assert source in COMPOSE["volumes"]
        for other in service.get("depends_on", {}):
            assert other in COMPOSE["services"]
        target = service.get("build", {}).get("target")
        if target is not None:
            assert re.search(rf"^FROM \S+ AS {target}$", DOCKERFILE, re.MULTILINE)
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    for source in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE):
        ignored = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
        for name in source.split():
            assert (ROOT / name).exists()
            assert f"!{name}" in ignored
    for name in ("spark-master", "spark-worker"):
        assert COMPOSE["services"][name]["command"][0] in SPARK_CLASSES
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/custody.yaml").read_text("utf-8"))
    (options,) = [one["options"] for one in provider["providers"]]
    there = [one.split(":")[1] for one in COMPOSE["services"]["grafana"]["volumes"]]
    assert f"{options['path']}/custody.json" in there
    rules = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text("utf-8"))["rule_files"]
    assert [(DEPLOY / "prometheus" / rule).exists() for rule in rules] == [True]
