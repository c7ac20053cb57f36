"""Request ids, and what a server writes down: a line for each request, and nothing that anybody confided to it."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import sql
from tests.cli.conftest import Run, environment, quick  # noqa: F401  # fixtures
from tests.http.conftest import Http, Process
from tests.waiting import wait_for

import custody
from custody.errors import Busy, CustodyError
from custody.http.logs import JsonLines, TextLines, Writer, written

pytestmark = pytest.mark.core


@pytest.mark.req("G20")
def test_every_answer_has_a_request_id(c: custody.Custody, http_: Http) -> None:
    c.create_topic("orders")
    for path in ("/topics", "/healthz", "/docs", "/openapi.json", "/nowhere", "/topics/nowhere", "/messages/orders"):
        given = http_.get(path, headers={"X-Request-Id": "a.b-c_1:2"})
        made = [http_.get(path), http_.get(path), http_.get(path, headers={"X-Request-Id": "no space"})]
        assert given.headers["x-request-id"] == "a.b-c_1:2"
        ids = {answer.headers["x-request-id"] for answer in made}
        assert len(ids) == 3
        assert all(len(one) == 32 for one in ids)
        for answer in (given, *made):
            if answer.status >= 400:
                assert answer.json["error"]["request_id"] == answer.headers["x-request-id"]
    assert http_.get("/topics", headers={"X-Request-Id": "x" * 129}).headers["x-request-id"] != "x" * 129
    assert http_("PUT", "/topics", headers={"X-Request-Id": "put"}).json["error"]["request_id"] == "put"
    assert (
        http_.get("/topics", headers={"X-Request-Id": "evil", "Origin": "https://evil.example"}).headers["x-request-id"]
        == "evil"
    )


def lines(server: Process) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log.read_text().splitlines()]


def break_table(db: psycopg.Connection, table: str) -> None:
    """Lets each insert fail in a way that no code expects."""
    db.execute(
        """CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE 'broken table' USING ERRCODE = 'XX000'; END $$"""
    )
    db.execute(
        sql.SQL("CREATE TRIGGER broken BEFORE INSERT ON {} EXECUTE FUNCTION broken()").format(
            sql.Identifier(*table.split("."))
        )
    )


@pytest.mark.req("G19")
def test_a_line_for_each_request_and_no_secret_in_any(
    c: custody.Custody, db: psycopg.Connection, process: Callable[..., Process]
) -> None:
    c.create_topic("orders")
    secret = c.create_api_key("shop", admin=["*"]).secret
    server = process()
    headers = {"Authorization": f"Bearer {secret}", "X-Custody-Worker": "hidden-worker"}

    def call(number: int, method: str, path: str, body: object = None, **given: str) -> int:
        return server.http(method, path, body, headers={**headers, "X-Request-Id": f"r{number}", **given}).status

    message = {"topic": "orders", "payload": "hidden-payload", "key": "hidden-key", "headers": {"a": "hidden-header"}}
    assert call(1, "POST", "/messages", message) == 200
    assert call(2, "GET", "/messages/orders?group=default&visibility_timeout=4711s") == 200
    assert call(3, "POST", "/messages", b'{"topic": "orders", "payload": hidden-payload') == 400
    assert call(4, "POST", "/messages", {**message, "priority": "hidden-priority"}) == 422
    assert call(5, "GET", "/topics/hidden-topic") == 404
    assert call(6, "GET", "/messages/orders", Authorization=f"Bearer {secret[:-1]}~") == 401
    assert call(7, "GET", "/messages/orders", **{"X-Api-Key": "hidden-key", "Authorization": "Basic hidden"}) == 401
    # the database refuses in its own words, with the row; and it fails in a way that nobody has thought of
    db.execute("ALTER TABLE custody.log_1 ADD CONSTRAINT no CHECK (key <> 'hidden-key') NOT VALID")
    assert call(8, "POST", "/messages", message) == 422
    break_table(db, "custody.log_1")
    assert call(9, "POST", "/messages", message) == 500
    wait_for(lambda: "r9" in server.log.read_text(), "the last request is noted")
    assert server.stop() == 0
    text = server.log.read_text()
    assert "hidden-" not in text
    assert "4711" not in text
    assert secret[17:-1] not in text
    found = {line["request_id"]: line for line in lines(server) if line.get("request_id", "").startswith("r")}
    assert {name: line["status"] for name, line in found.items()} == {
        "r1": 200, "r2": 200, "r3": 400, "r4": 422, "r5": 404, "r6": 401, "r7": 401, "r8": 422, "r9": 500,
    }  # fmt: skip
    first = found["r1"]
    assert (first["method"], first["route"], first["key"], first["client"]) == (
        "POST",
        "/messages",
        "shop",
        "127.0.0.1",
    )
    assert first["ms"] > 0
    assert found["r2"]["route"] == "/messages/{topic}"
    assert found["r6"]["key"] is None
    (failure,) = [line for line in lines(server) if line["level"] == "error"]
    assert "r9" in failure["message"]
    assert failure["cause"]["sqlstate"] == "XX000"
    assert "broken table" in failure["cause"]["database"]
    assert any("publishes.py" in frame for frame in failure["at"])


@pytest.mark.req("G20")
def test_callers_are_not_told_the_words_of_the_database(
    c: custody.Custody, db: psycopg.Connection, process: Callable[..., Process]
) -> None:
    c.create_topic("orders")
    server = process("--statement-timeout", "1s")
    message = {"topic": "orders", "payload": 1, "key": "hidden-value"}

    def refused(status: int, path: str = "/messages", body: object = message) -> dict[str, Any]:
        answer = server.http("POST", path, body)
        assert answer.status == status
        text = answer.body.decode()
        for word in ("custody.", "log_1", "relation", "function", "statement", "SELECT", "constraint", "hidden"):
            assert word not in text.replace("custody_error", ""), text
        error: dict[str, Any] = answer.json["error"]
        assert error["message"]
        wait_for(lambda: [line for line in lines(server) if line.get("request_id") == error["request_id"]], "logged")
        (line,) = [line for line in lines(server) if line.get("request_id") == error["request_id"] and "code" in line]
        assert line["code"] == error["code"]
        return line

    db.execute("ALTER TABLE custody.log_1 ADD CONSTRAINT no CHECK (key <> 'hidden-value') NOT VALID")
    assert refused(422)["cause"]["sqlstate"] == "23514"
    db.execute("ALTER TABLE custody.log_1 DROP CONSTRAINT no")
    with db.transaction():
        db.execute("LOCK TABLE custody.groups")
        line = refused(503, "/topics/orders/groups", {"name": "g"})
    assert (line["cause"]["sqlstate"], line["level"]) == ("57014", "warning")
    assert "statement timeout" in line["cause"]["database"]
    break_table(db, "custody.log_1")
    assert "broken table" in refused(500)["cause"]["database"]
    db.execute("ALTER FUNCTION custody.append RENAME TO hidden")
    line = refused(503)
    assert (line["cause"]["sqlstate"], line["level"]) == ("42883", "warning")
    assert "function custody.append" in line["cause"]["database"]


@pytest.mark.req("G19")
def test_text_and_only_warnings(process: Callable[..., Process]) -> None:
    text, none = process("--log-format", "text"), process("--log-level", "warning")
    for server in (text, none):
        assert server.http.get("/topics", headers={"X-Request-Id": "told"}).status == 200
        assert server.stop() == 0
    (line,) = [line for line in text.log.read_text().splitlines() if "told" in line]
    assert " INFO request request_id=told method=GET route=/topics status=200 ms=" in line
    assert none.log.read_text() == ""


def test_another_way_of_logging_is_refused(quick: Run) -> None:  # noqa: F811
    assert "'xml' is not one of 'text', 'json'" in quick("serve", "--log-format", "xml", code=2).err


@pytest.mark.req("G19")
@pytest.mark.parametrize("formatter", [JsonLines(), TextLines()])
def test_the_words_of_an_error_are_left_out_wherever_they_stand(formatter: logging.Formatter) -> None:
    stream = io.StringIO()
    logger = logging.getLogger("custody.test")
    writer = Writer(stream, formatter)
    logger.addHandler(writer)
    try:
        try:
            try:
                raise KeyError("hidden")
            except KeyError as error:
                raise CustodyError("hidden") from error
        except CustodyError as error:
            logger.error("it failed", exc_info=error)
            logger.warning("put off: %s", error)
        logger.warning("put off: %s, %d", Busy("somebody has it"), 1)
        logger.warning("100 %")
    finally:
        logger.removeHandler(writer)
        writer.close()
    said = stream.getvalue()
    assert "hidden" not in said
    assert said.count("\n") == 4
    for part in ("CustodyError", "KeyError", "test_request_lines.py", "somebody has it", "100 %"):
        assert part in said


EVIL = 'x\n2030-01-01 INFO request\r\x1b[2J\x9b\u2028\u202e\ud800 status=200 key="boss" é'


@pytest.mark.req("G19")
@pytest.mark.parametrize("formatter", [JsonLines(), TextLines()])
def test_no_name_makes_up_a_line_or_a_field(formatter: logging.Formatter, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    logger = logging.getLogger("custody.test")
    monkeypatch.setattr(logger, "propagate", False)  # a report of pytest-xdist cannot hold a lone surrogate
    writer = Writer(stream, formatter)
    logger.addHandler(writer)
    try:
        logger.warning("no news of %s", EVIL)
        logger.warning("failed: %s", Busy(EVIL))
        logger.warning("failed", exc_info=Busy(EVIL))
        logger.warning("request", extra={"custody": {"route": EVIL, "more": [EVIL], "ok": "plain"}})
    finally:
        logger.removeHandler(writer)
        writer.close()
    stream.seek(0)
    said = stream.read()
    assert said.count("\n") == 4
    assert all(line.isprintable() for line in said.splitlines())
    last = said.splitlines()[-1]
    if isinstance(formatter, JsonLines):
        found = json.loads(last)
        assert (found["route"], found["more"], found["ok"]) == (EVIL, [EVIL], "plain")
        assert "status" not in found
    else:
        assert last.endswith(f"route={json.dumps(EVIL)} more={json.dumps([EVIL])} ok=plain")


@pytest.mark.req("G19")
def test_what_callers_send_makes_up_no_line(c: custody.Custody, process: Callable[..., Process]) -> None:
    server = process("--log-format", "text")
    evil = "x%0A2030-01-01T00:00:00.000%20INFO%20forged%1B%5B2J"
    headers = {"X-Request-Id": "a forged=1", "User-Agent": "forged", "X-Custody-Worker": "forged\x9b2J"}
    for path in (f"/topics/{evil}", f"/messages/{evil}", f"/{evil}", f"/messages/{evil}/0?group={evil}"):
        assert server.http.get(path, headers=headers).status in (404, 422)
    assert server.http.get("/topics", headers={"X-Request-Id": "last"}).status == 200
    assert server.stop() == 0
    found = server.log.read_text()
    assert "request_id=last" in found
    assert "forged" not in found
    assert all(" INFO request request_id=" in line and line.isprintable() for line in found.splitlines())


@pytest.mark.req("G19")
def test_a_reader_that_stands_still_holds_up_nobody() -> None:
    going = threading.Event()

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            going.wait(20)
            return super().write(text)

    stream = Stuck()
    writer = Writer(stream, TextLines(), most=100)
    record = logging.LogRecord("custody", logging.INFO, "", 0, "line", None, None)
    for _ in range(1000):  # would not end before the reader goes on
        writer.handle(record)
    assert stream.getvalue() == ""
    going.set()
    writer.close()
    kept = stream.getvalue().count(" line\n")
    assert 100 <= kept < 1000
    assert f"{1000 - kept} lines were lost" in stream.getvalue()


def test_logging_is_as_before_when_the_server_has_ended() -> None:
    logger = logging.getLogger("custody")
    before = logger.level, logger.propagate, list(logger.handlers)
    stream = io.StringIO()
    with written("json", stream=stream):
        logging.getLogger("custody.http.access").info("request", extra={"custody": {"status": 200}})
    logger.warning("afterwards")
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
    (line,) = stream.getvalue().splitlines()
    assert (json.loads(line)["message"], json.loads(line)["status"]) == ("request", 200)
