"""The dashboard and the alert rules ask only for what a server, a worker, a relay or a pipeline tells."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.http.conftest import Http

import custody
from custody import Breaker, Policy
from custody.http.app import OPERATIONS
from custody.monitoring.exposition import of_pipelines, of_relay, of_workers, page
from custody.outbox import write
from custody.relay import Relay
from custody.vitals import Vitals

pytestmark = [pytest.mark.core, pytest.mark.req("G18")]

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS_LABELS = {"instance", "job"}
"""Prometheus itself adds these, and the metric `up`."""
WORDS = {"by", "and", "or", "unless", "on", "without", "ignoring", "group_left"}

Used = dict[str, set[str]]


def used_by(expression: str) -> Used:
    """Metrics of an expression with the labels that it picks or sums them by."""
    used: Used = defaultdict(set)
    sums = {
        label.strip()
        for group in re.findall(r"\b(?:by|without)\s*\(([^)]*)\)", expression)
        for label in group.split(",")
    }
    bare = re.sub(r"\b(?:by|without)\s*\([^)]*\)", " ", expression)
    bare = re.sub(r"\[[^\]]*\]", " ", bare)
    for name, braces in re.findall(r"\b([a-zA-Z_:][\w:]*)\b(?!\s*\()\s*({[^}]*})?", re.sub(r'"[^"]*"', '""', bare)):
        if name in WORDS or not re.search(rf"\b{name}\b", re.sub(r"{[^}]*}", "", re.sub(r'"[^"]*"', '""', bare))):
            continue
        used[name] |= {*re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", braces), *sums}
    return used


def expressions() -> Iterator[tuple[str, str, set[str]]]:
    """Where, what is asked, and the labels that a legend or a text shows."""
    dashboard = json.loads((DEPLOY / "grafana/custody.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert asked is not None
            yield variable["name"], asked[1], {asked[2]}
    for group in yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"], set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))


def of_everything(c: custody.Custody) -> Iterator[Any]:
    """The metrics of a worker, a relay and a pipeline that have had something to do."""
    worker = c.worker_for("orders", "default", lambda _: None)
    relay, pipeline = Relay(c), Vitals("driving")
    relay.close()
    for vitals in (worker.vitals, relay.vitals, pipeline):
        vitals.claimed(1)
    yield from of_workers({"orders/default": worker})
    yield from of_relay(relay)
    yield from of_pipelines({"screening": ("orders", "screening", pipeline)})


@pytest.fixture
def told(c: custody.Custody, http_: Http, db: psycopg.Connection[Any]) -> Used:
    """Every metric of a server that has had some traffic, of a worker, a relay and a pipeline, with its labels."""
    c.create_topic("orders")
    c.create_group("orders", "default", Policy(breaker=Breaker()))
    c.create_group("orders", "screening")
    c.drive("orders", "screening")
    with db.transaction():
        write(db, event_type="made", payload=1, destination="stdout:")
    http_.post("/messages", {"topic": "orders", "payload": 1})
    lease = http_.get("/messages/orders").json
    assert http_.post("/messages/ack", {"lease_id": lease["lease_id"]}).status == 200
    http_.get("/metrics")
    found: Used = defaultdict(set, {"up": set()})
    monitored = page(lambda: of_everything(c))[0].decode()
    for family in text_string_to_metric_families(http_.get("/metrics").body.decode() + monitored):
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return found


def test_every_metric_and_label_that_is_asked_for_exists(told: Used) -> None:
    seen = list(expressions())
    assert len(seen) > 30
    for where, expression, shown in seen:
        used = used_by(expression)
        assert used, f"{where}: {expression}"
        for metric, labels in used.items():
            assert metric in told, f"{where} asks for {metric}, which no server tells"
            missing = (labels | shown) - told[metric] - PROMETHEUS_LABELS
            assert not missing, f"{where}: {metric} has no label {missing}"


def documented() -> Used:
    """The metrics in the tables of the docs, with their labels. `_x` stands for a metric of the same kind."""
    found: Used = {}
    page = (DEPLOY.parent / "docs/observability.md").read_text(encoding="utf-8")
    for names, labels in re.findall(r"^\| (`custody_.*?) \| (.*?) ?\|", page, re.MULTILINE):
        first, *others = re.findall(r"`(_?\w+)`", names)
        kind = "_".join(first.split("_")[:2])
        for name in (first, *(kind + other if other.startswith("_") else other for other in others)):
            found[name] = set(labels.split(", ")) - {""}
    return found


def test_the_docs_have_every_metric_with_its_labels(told: Used) -> None:
    sampled = re.compile(r"_(bucket|sum|count)$")
    real: Used = defaultdict(set)
    for name, labels in told.items():
        if name.startswith("custody_"):
            real[sampled.sub("", name)] |= labels - {"le"}
    real["custody_build_info"].clear()  # its only label is what it says
    assert documented() == real


def test_what_an_expression_uses_is_found() -> None:
    asked = 'sum by (le, route) (rate(a_bucket{status=~"5..", x!="b and c"}[5m])) / max(b_total) > 0.5 and c == 0'
    assert used_by(asked) == {
        "a_bucket": {"status", "x", "le", "route"},
        "b_total": {"le", "route"},
        "c": {"le", "route"},
    }


def test_a_label_that_is_shown_survives_the_sum() -> None:
    for where, expression, shown in expressions():
        kept = re.findall(r"\b(?:sum|max|min)\s+by\s*\(([^)]*)\)", expression)
        if re.match(r"(sum|max|min|histogram_quantile)\b", expression):
            labels = {label.strip() for group in kept for label in group.split(",")} | {"le"}
            assert shown <= labels, f"{where} shows {shown - labels}, which the sum has dropped"


def test_what_matters_is_watched() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    watched = {metric for rule in rules for metric in used_by(rule["expr"])}
    assert {
        "up",
        "custody_up",
        "custody_http_requests_total",
        "custody_group_lag",
        "custody_group_dead",
        "custody_group_oldest_unresolved_age_seconds",
        "custody_group_breaker_state",
        "custody_outbox_backlog",
        "custody_pipeline_state",
        "custody_worker_overdue_seconds",
    } <= watched
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


def picked(expression: str, metric: str, labels: dict[str, str]) -> bool:
    """Whether a selector of this metric, the first in an expression, picks a series with these labels."""
    found = re.search(rf"\b{metric}{{(.*?)}}", expression)
    assert found is not None, expression
    tests: dict[str, Callable[[str, str], bool]] = {
        "=": lambda value, wanted: value == wanted,
        "!=": lambda value, wanted: value != wanted,
        "=~": lambda value, wanted: re.fullmatch(wanted, value) is not None,
        "!~": lambda value, wanted: re.fullmatch(wanted, value) is None,
    }
    asked = re.findall(r'(\w+)(=~|!~|!=|=)"((?:[^"\\]|\\.)*)"', found[1])
    assert asked, expression
    return all(tests[how](labels.get(name, ""), wanted) for name, how, wanted in asked)


@pytest.mark.parametrize("where", ["CustodyErrors", "Errors of the server"])
def test_a_group_that_is_paused_is_no_error(c: custody.Custody, http_: Http, where: str) -> None:
    c.create_topic("orders")
    c.create_group("orders", "default")
    c.pause("orders", "default")
    status = http_.get("/messages/orders").status
    (expression,) = [asked for place, asked, _ in expressions() if place == where]
    assert not picked(expression, "custody_http_requests_total", {"status": str(status)})
    assert picked(expression, "custody_http_requests_total", {"status": "500"})


@pytest.mark.parametrize("where", ["Latency p50", "Latency p99"])
def test_what_waits_is_not_in_the_latencies(where: str) -> None:
    (expression,) = [asked for place, asked, _ in expressions() if place == where]
    metric = "custody_http_request_duration_seconds_bucket"
    for operation in OPERATIONS:
        waits = "wait" in operation.query.__struct_fields__
        assert picked(expression, metric, {"route": operation.path}) is not waits, operation.path
