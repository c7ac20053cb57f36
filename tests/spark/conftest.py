"""A cluster for the tests that need one, and short pauses where a pipeline fails and goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.spark.cluster import Cluster, cluster


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("driving", "settlement"):
        monkeypatch.setattr(f"custody.spark.driver.{module}.FIRST_PAUSE", 0.02)


@pytest.fixture(scope="session")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A standalone cluster with two workers, for drivers in processes of their own."""
    with cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made
