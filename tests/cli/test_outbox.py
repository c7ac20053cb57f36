"""`custody outbox` and `custody relay`."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from tests.cli.conftest import Run
from tests.conftest import url_of
from tests.outbox.web_service import Service
from tests.waiting import wait_for

import custody
from custody.outbox import Outbox

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture
def events(database_url: str) -> list[str]:
    with psycopg.connect(database_url) as connection:
        return [
            str(
                custody.outbox.write(
                    connection, event_type="placed", payload={"n": n}, destination="stdout:", ordering_key="k"
                )
            )
            for n in range(3)
        ]


@pytest.fixture
def outbox(database_url: str) -> Iterator[Outbox]:
    with Outbox(database_url) as opened:
        yield opened


def test_relay_to_stdout_and_what_becomes_of_the_events(
    cli: Run, quick: Run, events: list[str], explained: Callable[[Any], None]
) -> None:
    listed = quick("outbox", "list", "--state", "pending", "--json").document
    explained(listed)
    assert [event["event_id"] for event in listed] == events
    done = cli("relay", "run", "--drain", "--json")
    *printed, summary = [json.loads(line) for line in done.out.splitlines()]
    assert [line["payload"]["n"] for line in printed] == [0, 1, 2]
    explained(summary)
    assert summary["summary"]["published"] == 3
    assert quick("outbox", "list", "--state", "PENDING").out == "No event matches.\n"
    shown = quick("outbox", "show", events[0]).out
    assert "PUBLISHED" in shown
    assert '{"n":0}' in shown
    assert quick("outbox", "show", str(uuid4()), "--json", code=1).error["code"] == "event_not_found"
    stats = quick("outbox", "stats", "--json").document
    explained(stats)
    assert [(one["destination"], one["backlog"], one["published_recently"]) for one in stats] == [("stdout:", 0, 3)]
    assert 'custody_outbox_published_recently{destination="stdout:"} 3' in quick("outbox", "stats", "--metrics").out
    assert "stdout:" in quick("outbox", "stats").out


def test_replay_kill_and_prune_ask_first_and_leave_records(
    quick: Run, events: list[str], outbox: Outbox, explained: Callable[[Any], None]
) -> None:
    assert "needs a confirmation" in quick("outbox", "kill", events[0], code=2).err
    killed = quick("outbox", "kill", *events, "--yes", "--reason", "a mistake", "--json").document
    explained(killed)
    assert killed["events"] == events
    assert {event.last_error for event in outbox.events()} == {"given up: a mistake"}
    assert quick("outbox", "replay", "--dry-run", "--json").document["count"] == 3
    assert quick("outbox", "replay", "--state", "PENDING", code=1).err.startswith("error: only events that are")
    assert "1 event replayed" in quick("outbox", "replay", events[1], "--yes").out
    assert [str(event.status) for event in outbox.events()] == ["DEAD", "PENDING", "DEAD"]
    assert quick("outbox", "prune", "--older-than", "1h", "--state", "DEAD", "--yes").out == "0 events removed\n"
    dry = quick("outbox", "prune", "--older-than", "0s", "--state", "DEAD", "--dry-run", "--json").document
    explained(dry)
    assert dry == {"dry_run": True, "count": 2}
    assert quick("outbox", "prune", "--older-than", "0s", "--state", "DEAD", "--yes").out == "2 events removed\n"
    records = quick("outbox", "audit", "--json").document
    explained([{name: value for name, value in record.items() if name != "chosen"} for record in records])
    assert [(record["action"], record["events"]) for record in records] == [("prune", 2), ("replay", 1), ("kill", 3)]
    assert "kill" in quick("outbox", "audit").out
    assert "not a state" in quick("outbox", "list", "--state", "nothing", code=2).err


def test_a_replay_says_what_it_leaves_out(
    quick: Run, c: custody.Custody, outbox: Outbox, db: psycopg.Connection[Any], explained: Callable[[Any], None]
) -> None:
    c.create_topic("gone")
    event = custody.outbox.write(db, event_type="placed", payload=1, destination="gone")
    outbox.kill([event])
    c.delete_topic("gone")
    document = quick("outbox", "replay", "--yes", "--json").document
    explained(document)
    assert document == {"dry_run": False, "count": 0, "events": [], "stranded": [str(event)]}
    assert "1 event left out, because the topic was deleted" in quick("outbox", "replay", "--dry-run").err


def test_a_dry_run_forgets_nothing_of_what_has_come(quick: Run, outbox: Outbox, db: psycopg.Connection[Any]) -> None:
    db.execute("INSERT INTO custody.outbox_received VALUES (1, '', gen_random_uuid(), 0, now() - interval '1 day')")
    prune = ("outbox", "prune", "--older-than", "1h", "--received")
    assert quick(*prune, "--dry-run").out == "1 event would be forgotten\n"
    assert (db.execute("SELECT count(*) FROM custody.outbox_received").fetchone(), outbox.audit()) == ((1,), [])
    assert "needs a confirmation" in quick(*prune, code=2).err
    assert quick(*prune, "--yes", "--reason", "old").out == "1 event forgotten\n"
    assert quick(*prune, "--yes").out == "0 events forgotten\n"
    (record,) = outbox.audit()
    assert (record["action"], record["events"], record["reason"]) == ("forget", 1, "old")


def test_verify_prints_a_result_for_each_id(quick: Run, explained: Callable[[Any], None]) -> None:
    lines = quick("outbox", "verify").out.splitlines()
    assert lines[0].startswith("O1.1   MUST    ok")
    assert lines[-1].endswith("checks passed")
    document = quick("outbox", "verify", "--json").document
    explained(document)
    assert document["conforms"]


def test_install_into_a_database_of_ones_own(quick: Run, server_url: str) -> None:
    name = "custody_cli_alone"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {} STRATEGY FILE_COPY").format(sql.Identifier(name)))
        url = url_of(server_url, name)
        missing = quick("outbox", "list", "--database", url, "--json", code=1)
        assert missing.error["code"] == "schema_missing"
        assert quick("outbox", "install", "--database", url).out == "the outbox is installed\n"
        assert quick("outbox", "install", "--database", url, "--json").document == {"changed": False}
        assert "checks passed" in quick("outbox", "verify", "--database", url).out
        assert "0 published" in quick("relay", "run", "--drain", "--database", url).out
        with psycopg.connect(url) as other:
            found = other.execute("SELECT to_regclass('custody.topics')").fetchone()
        assert found == (None,), "more than the outbox was made"
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


WAITING = """
import time
from pathlib import Path
from custody.relay import Publisher

class Waiting(Publisher):
    def publish(self, event):
        Path("begun").touch()
        while not Path("leave").exists():
            time.sleep(0.01)
        with open("got", "a") as got:
            got.write(str(event.payload))

waiting = Waiting()
"""


@pytest.mark.req("O8")
def test_sigterm_ends_a_relay_gracefully(
    start: Callable[..., Any], outbox: Outbox, tmp_path: Any, database_url: str
) -> None:
    """With an event on its way, and others of its key behind it: that one is finished, those are given back."""
    (tmp_path / "mine.py").write_text(WAITING)
    with psycopg.connect(database_url) as connection:
        for n in range(4):
            custody.outbox.write(connection, event_type="placed", payload=n, destination="own:", ordering_key="k")
    process = start("relay", "run", "--publisher", "own=mine:waiting")
    wait_for((tmp_path / "begun").exists, "nothing is published")
    process.send_signal(signal.SIGTERM)
    assert [event.status.value for event in outbox.events()] == ["CLAIMED"] * 4
    (tmp_path / "leave").touch()
    assert process.wait(20) == 0
    assert (tmp_path / "got").read_text() == "0"
    assert [(event.status.value, event.attempts) for event in outbox.events()] == [
        ("PUBLISHED", 0),
        *[("PENDING", 0)] * 3,
    ]
    assert "stopped: 1 published, 0 moved into topics, 0 failed, 0 dead, 3 released" in process.stdout.read()


def test_a_relay_may_serve_named_destinations_only(
    quick: Run, events: list[str], outbox: Outbox, db: psycopg.Connection[Any]
) -> None:
    custody.outbox.write(db, event_type="placed", payload=1, destination="mine:")
    options = ("--publisher", "mine=stdout", "--named-only", "--secret", SECRET)
    assert "1 published" in quick("relay", "run", "--drain", *options).out
    assert [str(event.status) for event in outbox.events()] == ["PENDING"] * 3 + ["PUBLISHED"]


@pytest.mark.req("O9")
def test_the_settings_of_webhooks(quick: Run, outbox: Outbox, db: psycopg.Connection[Any]) -> None:
    service = Service()
    try:
        for n in range(2):
            custody.outbox.write(db, event_type="placed", payload=n, destination=service.url)
        assert "2 dead" in quick("relay", "run", "--drain", "--allow-network", "10.0.0.0/8").out
        assert [event.status for event in outbox.events()] == ["DEAD", "DEAD"], "a loopback address was called"
        assert service.requests == []
        outbox.replay()
        service.answers = [404]
        options = ("--drain", "--allow-network", "127.0.0.0/8", "--refused", "404")
        quick("relay", "run", *options, CUSTODY_WEBHOOK_SECRET=f"{SECRET} {SECRET}")
        assert sorted(event.status for event in outbox.events()) == ["DEAD", "PUBLISHED"]
        assert [len(headers["webhook-signature"].split()) for _, _, headers, _ in service.requests] == [2, 2]
    finally:
        service.close()
    assert "whsec_" in quick("relay", "run", "--named-only", "--secret", "s3cret", code=1).err
    assert "10.0.0.0/8" in quick("relay", "run", "--allow-network", "here", code=1).err


def test_bad_publishers_are_usage_errors(quick: Run, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "NAME=PUBLISHER" in quick("relay", "run", "--publisher", "nothing", code=2).err
    (tmp_path / "things.py").write_text("number = 1")
    assert "neither a publisher nor a function" in quick("relay", "run", "--publisher", "a=things:number", code=2).err
    assert "no publisher 'kafka'" in quick("relay", "run", "--publisher", "a=kafka", code=1).err
    assert "release or hold" in quick("relay", "run", "--on-dead", "x", code=1).err
