"""A cluster for the tests that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.spark.cluster import Cluster, cluster


@pytest.fixture(scope="session")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A standalone cluster with two workers, for drivers in processes of their own."""
    with cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made
