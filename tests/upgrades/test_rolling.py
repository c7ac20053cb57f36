"""Rolling upgrades: code of a release works with the schema of the one before and of the one after, and is refused by
any other."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from tests.conformance.roles import as_role, granting
from tests.upgrades.conftest import MIGRATE, Releases
from tests.upgrades.processes import Running, running
from tests.upgrades.releases import program
from tests.waiting import wait_for

import custody

pytestmark = [pytest.mark.req("X13"), pytest.mark.chaos]

UNANSWERED = (
    "import sys, psycopg\nfrom custody.store.interfaces import unanswered\n"
    "with psycopg.connect(sys.argv[1], autocommit=True) as connection:\n"
    "    print(*unanswered(connection, int(sys.argv[2])), sep='\\n')"
)
OPEN = (
    "import sys, custody\ntry:\n    custody.connect(sys.argv[1]).close()\n    print('opened')\n"
    "except custody.CustodyError as error:\n    print(error.code, error.message, error.remedy)"
)


def lines(text: list[str]) -> list[str]:
    return [line for line in text if line]


def test_old_and_new_code_publish_and_consume_while_the_schema_is_migrated(made: Releases, old_url: str) -> None:
    with granting(old_url), ExitStack() as stack:
        app = as_role(old_url, "app")

        def start(package: Any, name: str) -> Running:
            return stack.enter_context(running(package, app, name))

        old, new = start(made.first, "old"), start(made.second, "new")
        for one in (old, new):
            one.goes_on()
        assert program(made.second, MIGRATE, old_url) == ["[2, 3]"]
        for one in (old, new):
            one.goes_on()
        later = [start(made.first, "old, started later"), start(made.second, "new, started later")]
        for one in (old, new, *later):
            one.goes_on()
        found = [one.end() for one in (old, new, *later)]
        assert [one["errors"] for one in found] == [[]] * 4
        assert [one["release"] for one in found] == [1, 1, 2, 2]
        with custody.connect(old_url) as c:  # code of this release, too
            rest = 0
            while lease := c.claim("orders", "stock", max_messages=100):
                rest += lease.ack().settled
        assert sum(one["handled"] for one in found) + rest == sum(one["sent"] for one in found)


def test_code_of_any_other_release_is_refused_with_a_remedy(made: Releases, old_url: str) -> None:
    assert lines(program(made.third, OPEN, old_url))[0].startswith("schema_older the database is at schema version 1")
    with running(made.first, old_url, "old", "--until-refused") as old:
        old.goes_on()
        assert program(made.third, MIGRATE, old_url) == ["[2, 3, 4]"]
        wait_for(lambda: old.last.get("errors") and "release" in old.last, "the old code is refused")
        (code, message, remedy) = old.end()["errors"][0]
        assert code == "schema_newer"
        assert "release 3" in message
        assert "Upgrade this installation of Custody" in remedy
    with pytest.raises(custody.errors.SchemaNewer, match=r"release 3.*this code at .*Upgrade this"):
        custody.connect(old_url)
    for package in (made.second, made.third):
        assert program(package, OPEN, old_url) == ["opened"]


def test_a_schema_answers_all_that_the_code_of_the_release_before_calls(made: Releases, old_url: str) -> None:
    program(made.second, MIGRATE, old_url)
    assert lines(program(made.second, UNANSWERED, old_url, "1")) == []
    with psycopg.connect(old_url, autocommit=True) as connection:
        connection.execute("ALTER FUNCTION custody.release_key RENAME TO key_released")
        connection.execute("ALTER VIEW custody.blocked_keys RENAME COLUMN why TO reason")
    broken = lines(program(made.second, UNANSWERED, old_url, "1"))
    assert {line.partition(":")[0] for line in broken} == {"blocked_keys", "release_key"}
    with psycopg.connect(old_url, autocommit=True) as connection:
        connection.execute("ALTER FUNCTION custody.key_released RENAME TO release_key")
        connection.execute("ALTER VIEW custody.blocked_keys RENAME COLUMN reason TO why")
    program(made.third, MIGRATE, old_url)
    assert lines(program(made.third, UNANSWERED, old_url, "2")) == []


def test_what_is_new_needs_the_migration_and_says_so(made: Releases, old_url: str) -> None:
    text = (
        "import sys, custody\nc = custody.connect(sys.argv[1])\n"
        "from uuid import UUID\nnobody = UUID(int=0)\n"
        "for call in (lambda: c._db.call('finish_lease', lease_id=nobody),\n"
        "             lambda: c._db.call('ack_lease', lease_id=nobody, note='new')):\n"
        "    try:\n        print(call())\n    except custody.CustodyError as error:\n"
        "        print(error.code, error.message, error.remedy)\n"
        "print(c._db.call('ack_lease', lease_id=nobody, note=None)[0][0])"
    )
    assert program(made.second, text, old_url) == [
        "schema_older the database is at release 1, which has no function finish_lease Run `custody migrate`.",
        "schema_older the database is at release 1, where ack_lease does not know note Run `custody migrate`.",
        "0",
    ]
