"""Names of topics and groups are completed; a database that is not there, silent or stopped offers none."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli.conftest import Run
from tests.http.conftest import served

import custody
from custody import Custody
from custody.cli import completion


def completed(cli: Run, words: str, **variables: str) -> list[str]:
    """What a bash would offer after these words; the last one is incomplete."""
    given = {"_CUSTODY_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    answer = cli(**given, **variables)
    assert answer.err == ""
    return answer.out.split()


def test_names_of_topics_and_groups(cli: Run, live: Custody) -> None:
    for topic, groups in {"orders": ["mail", "stock"], "other": ["audit"], "jobs": ["run"]}.items():
        live.create_topic(topic)
        for group in groups:
            live.create_group(topic, group)
    assert completed(cli, "custody dead o") == ["orders", "other"]
    assert completed(cli, "custody blocked list orders ") == ["mail", "stock"]
    assert completed(cli, "custody maintain --topic j") == ["jobs"]
    assert completed(cli, "custody topics create o") == [], "a new topic has a new name"
    with served(live) as server:
        assert completed(cli, "custody stats orders s", CUSTODY_DATABASE=server.url) == ["stock"]


@contextmanager
def silent() -> Iterator[str]:
    """Accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"postgresql://nobody@127.0.0.1:{listening.getsockname()[1]}/none"


def test_a_database_that_does_not_answer_offers_nothing_soon(cli: Run) -> None:
    assert completed(cli, "custody dead o", CUSTODY_DATABASE="postgresql://nobody@127.0.0.1:1/none") == []
    assert completed(cli, "custody dead o", CUSTODY_DATABASE="mysql://x") == []
    with silent() as url:
        assert completed(cli, "custody dead o", CUSTODY_DATABASE=url) == []


def test_the_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    with silent() as url:
        app = typer.Typer()
        app.command()(lambda: None)
        context = typer.main.get_command(app).make_context("custody", [])
        context.params["database"] = url
        monkeypatch.setattr(completion, "TIMEOUT", 0.2)
        monkeypatch.setattr("logging.disable", lambda: None)  # of this process
        before = time.monotonic()
        assert completion.topics(context, "o") == []
        assert time.monotonic() - before < 5


def test_no_server_is_started(cli: Run, base: Path) -> None:
    home = base / "home"
    assert completed(cli, "custody dead o", CUSTODY_DATABASE="", CUSTODY_HOME=str(home)) == []
    assert not home.exists()
    with custody.connect(home=home) as c:
        c.create_topic("orders")
        assert completed(cli, "custody dead o", CUSTODY_DATABASE="", CUSTODY_HOME=str(home)) == ["orders"]
    assert completed(cli, "custody dead o", CUSTODY_DATABASE="", CUSTODY_HOME=str(home)) == []
    assert custody.store.embedded.running(home) is None
