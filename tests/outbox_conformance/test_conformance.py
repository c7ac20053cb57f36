"""Section O as a list of checks, each a test with its id: on an outbox alone and on one in a whole Custody."""

from __future__ import annotations

import psycopg
import pytest
from tests.outbox.conftest import alone_url, kept_alone  # noqa: F401  # fixtures

import custody
from custody.outbox import event_checks, operating_checks  # noqa: F401  # they register themselves
from custody.outbox.conformance import CHECKS, findings

pytestmark = [
    pytest.mark.core,
    pytest.mark.req("O1", "O2", "O3", "O4", "O5", "O6", "O7", "O8", "O9", "O10", "O11", "O12"),
]


@pytest.fixture(scope="module", params=["alone", "whole"])
def results(request: pytest.FixtureRequest, server_url: str, template: str) -> dict[str, str | None]:
    """What each check found, by its id: null if it passed."""
    name = f"custody_conformance_{request.param}"
    from psycopg import sql
    from tests.conftest import url_of

    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
        connection.execute(sql.SQL("CREATE DATABASE {} STRATEGY FILE_COPY").format(sql.Identifier(name)))
        url = url_of(server_url, name)
        (custody.outbox.install if request.param == "alone" else custody.migrate)(url)
        with psycopg.connect(url, autocommit=True) as outbox:
            found = {one.id: one.error for one in findings(outbox)}
            assert outbox.execute("SELECT count(*) FROM custody.outbox").fetchone() == (0,), "something was left behind"
            assert outbox.execute("SELECT count(*) FROM custody.outbox_audit").fetchone() == (0,)
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
    return found


@pytest.mark.parametrize("check", [f"{number} {level} {text}" for number, level, text, _ in CHECKS])
def test_check(results: dict[str, str | None], check: str) -> None:
    assert results[check.split()[0]] is None, check


def test_each_requirement_has_checks_and_each_check_an_id_of_its_own() -> None:
    numbers = [number for number, *_ in CHECKS]
    assert len(set(numbers)) == len(numbers)
    assert list(dict.fromkeys(number.partition(".")[0] for number in numbers)) == [f"O{n}" for n in range(1, 13)]
