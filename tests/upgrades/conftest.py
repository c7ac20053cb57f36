"""Two releases after this one, and databases at each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest
from tests.databases import Copy
from tests.upgrades import releases

MIGRATE = "import sys, custody; print(custody.migrate(sys.argv[1]))"


class Releases(NamedTuple):
    """Where the package of each release is."""

    first: Path
    second: Path
    third: Path


@pytest.fixture(scope="session")
def made(server_url: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> Releases:
    directory = tmp_path_factory.mktemp("releases")
    with closing(Copy(server_url, template)) as copy:
        second = releases.second(directory / "second", copy.url)
        releases.program(second, MIGRATE, copy.url)
        third = releases.third(directory / "third", second, copy.url)
    return Releases(releases.PACKAGE.parent, second, third)


@pytest.fixture
def old_url(server_url: str, template: str) -> Iterator[str]:
    """A database of the present release, with a topic and a group."""
    import custody

    with closing(Copy(server_url, template)) as copy:
        with custody.connect(copy.url) as c:
            c.create_topic("orders", partitions=2)
            c.create_group("orders", "stock", custody.Policy(max_attempts=1000))
        yield copy.url


@pytest.fixture
def release_of() -> Callable[[str], list[tuple[int, int]]]:
    def found(url: str) -> list[tuple[int, int]]:
        with psycopg.connect(url) as connection:
            return connection.execute(
                "SELECT release, (SELECT max(version) FROM custody.migrations) FROM custody.release"
            ).fetchall()

    return found
