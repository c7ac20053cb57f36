"""custody schedules: made, listed, edited, paused, run and deleted from a shell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.cli.conftest import Run

from custody import Custody

pytestmark = pytest.mark.req("X12")


@pytest.fixture(autouse=True)
def jobs(live: Custody) -> None:
    live.create_topic("jobs")


def test_a_schedule_from_its_creation_to_its_end(quick: Run, live: Custody, explained: Callable[[Any], None]) -> None:
    assert quick("schedules", "list").out == "There are no schedules.\n"
    made = quick(
        *("schedules", "create", "report", "--topic", "jobs", "--cron", "0 6 * * *", "--tz", "Europe/Berlin"),
        *("--payload", '{"kind": "daily"}', "--key", "k", "--header", "source=cli", "--missed", "catch_up", "--json"),
    ).document
    explained(made)
    assert (made["cron"], made["payload"], made["headers"]) == ("0 6 * * *", {"kind": "daily"}, {"source": "cli"})
    assert quick("schedules", "create", "report", "-t", "jobs", "--every", "1m", "--json", code=1).error["code"] == (
        "schedule_exists"
    )
    assert "every 5 min, next " in quick("schedules", "edit", "report", "--every", "5m").out
    assert "every 60 s" in quick("schedules", "create", "report", "-t", "jobs", "--every", "1m", "--ensure").out
    assert quick("schedules", "pause", "report", "--reason", "holidays").out == "schedule report: paused\n"
    assert quick("schedules", "pause", "report", "--json").document == {"schedule": "report", "changed": False}
    assert "paused" in quick("schedules", "list").out
    assert "holidays" in quick("schedules", "describe", "report").out
    ran = quick("schedules", "run", "report", "--json").document
    explained(ran)
    assert live.read("jobs")[0].offset == ran["offset"]
    assert quick("schedules", "resume", "report").out == "schedule report: resumed\n"
    assert quick("schedules", "resume", "report").out == "schedule report: it was not paused\n"
    (listed,) = quick("schedules", "list", "--json").document
    assert listed == quick("schedules", "describe", "report", "--json").document
    assert "confirmation" in quick("schedules", "delete", "report", code=2).err
    assert quick("schedules", "delete", "report", "--yes").out == "deleted schedule report\n"
    assert live.schedules() == []


def test_what_is_wrong_is_said_with_what_to_do(quick: Run, live: Custody) -> None:
    live.ensure_schedule("refresh", topic="jobs", every="1h", app="shop")
    listed = quick("schedules", "list")
    assert "unattended" in listed.out
    assert "custody schedules delete refresh" in listed.err
    assert "The app shop makes it again" in quick("schedules", "delete", "refresh", code=2).err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("create", "r", "-t", "jobs", "--every", "1m", "--cron", "@daily"), "cannot be combined"),
        (("create", "r", "-t", "jobs", "--every", "soon"), "soon"),
        (("create", "r", "-t", "jobs", "--every", "1m", "--payload", "{"), "not JSON"),
        (("edit", "r"), "nothing to change"),
    ],
)
def test_a_wrong_command_line_is_refused(quick: Run, arguments: tuple[str, ...], said: str) -> None:
    assert said in quick("schedules", *arguments, code=2).err


def test_text_is_a_payload_too(quick: Run, live: Custody) -> None:
    quick("schedules", "create", "r", "-t", "jobs", "--every", "1m", "--payload", "go", "--text")
    assert live.schedule("r").payload == "go"
    assert "not a cron" in quick("schedules", "edit", "r", "--cron", "soon", code=1).err
