"""Declarative Pipelines: a project with Custody as source and as sink, run twice; the second run adds nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.spark.programs import BIN, connect_server, documented, environment, finish
from tests.spark.test_source import assert_hidden, with_password

import custody


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The project of the page, with its storage here."""
    for name in ("spark-pipeline.yml", "transformations/orders.py"):
        file = tmp_path / "project" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(documented(name).replace("file:///var/lib/orders", (tmp_path / "storage").as_uri()))
    return tmp_path / "project"


def run(project: Path, server: str) -> str:
    """What the page says, on a server that is there; all that it had to say."""
    command = [BIN / "spark-pipelines", "run", "--spec", project / "spark-pipeline.yml", "--remote", server]
    code, said = finish(command, project.parent, environment())
    assert code == 0, said[-3000:]
    assert "Run is COMPLETED" in said
    return said


@pytest.mark.slow
@pytest.mark.req("S5")
def test_a_project_runs_twice_and_publishes_once(database_url: str, project: Path) -> None:
    url = with_password(database_url)
    with custody.connect(database_url) as c:
        for topic in ("orders", "large"):
            c.create_topic(topic, partitions=2)
        c.publish_many("orders", [custody.Outgoing({"amount": 10.0 * n}, key=f"k{n}") for n in range(20)])
        with connect_server(project.parent, url, {}) as server:
            for _ in range(2):
                said = run(project, server)
                large = [message for p in range(2) for message in c.read("large", p)]
                assert sorted(message.payload["amount"] for message in large) == [10.0 * n for n in range(11, 20)]
                assert {message.key for message in large} == {f"k{n}" for n in range(11, 20)}
                assert any((project.parent / "spark-warehouse").rglob("*.parquet")), "the table is there too"
                assert_hidden(url, said, project.parent)
