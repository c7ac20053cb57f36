"""Every page answers, with an empty database and with groups in trouble, and shows what an operator looks for."""

from __future__ import annotations

import json

import pytest
from tests.dashboard.conftest import submit
from tests.http.conftest import Http

import custody

pytestmark = pytest.mark.req("N6")

PAGES = ("/ui", "/ui/", "/ui/topics", "/ui/workers", "/ui/schedules", "/ui/outbox", "/ui/message")
GROUP = "/ui/topics/orders/groups/billing"


def text(http: Http, path: str) -> str:
    answer = http.get(path)
    assert answer.status == 200, answer.body.decode()
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    return answer.body.decode()


@pytest.mark.parametrize("path", PAGES)
def test_an_empty_database_has_pages(http_: Http, path: str) -> None:
    assert "<h1>" in text(http_, path)


def test_a_browser_at_the_root_comes_to_the_overview(http_: Http) -> None:
    moved = http_.get("/", headers={"Accept": "text/html,application/xhtml+xml"})
    assert (moved.status, moved.headers["location"]) == (303, "/ui")
    assert http_.get("/", headers={"Accept": "*/*"}).status == 404, "the API has nothing there"


def test_the_worst_group_comes_first(troubled: custody.Custody, http_: Http) -> None:
    troubled.create_topic("quiet")
    troubled.create_group("quiet", "idle")
    page = text(http_, "/ui")
    assert page.index("groups/billing") < page.index("groups/mail") < page.index("groups/idle")
    assert 'class="chip bad">dead letters' in page
    assert page.count('class="chip bad"') == 1, "only what is wrong is red"
    assert 'class="chip good">ok' in page


def test_a_search_and_an_order(troubled: custody.Custody, http_: Http) -> None:
    troubled.create_group("orders", "Audit")
    assert "groups/mail" not in text(http_, "/ui?q=ORDERS/bill")
    ordered = text(http_, "/ui?sort=group")
    assert ordered.index("groups/Audit") < ordered.index("groups/billing") < ordered.index("groups/mail")
    troubled.pause("orders", "mail")
    assert "groups/Audit" not in text(http_, "/ui?only=trouble")
    assert "No group matches" in text(http_, "/ui?q=nothing")


def test_a_blocked_key_has_its_reason(troubled: custody.Custody, http_: Http) -> None:
    page = text(http_, GROUP)
    for said in ("offset 0 of partition 0", "dead since", "TimeoutError: no answer", "<strong>2</strong> behind it"):
        assert said in page
    mail = text(http_, "/ui/topics/orders/groups/mail")
    assert "failing since" in mail
    assert "next try" in mail


def test_a_partition_is_a_picture_with_ways_into_it(troubled: custody.Custody, http_: Http) -> None:
    troubled.publish_many("orders", [custody.Outgoing(number) for number in range(1000)])
    troubled.claim("orders", "billing", max_messages=300)
    page = text(http_, GROUP)
    assert 'class="m-dead"' in page
    assert 'class="m-in_flight"' in page
    assert f'href="{GROUP}?partition=0&amp;from=0&amp;until=6"' in page, "six messages a column lead to those six"
    near = text(http_, GROUP + "?partition=0&from=0&until=6")
    assert 'href="/ui/topics/orders/messages/0/0"' in near
    assert f'hx-get="{GROUP}?partition=0&amp;from=0&amp;until=6"' in near, "an update shows the same"
    assert "test" in near.partition("<h2>Leases</h2>")[2].partition("<h2>")[0]


def test_dead_letters_with_filters(troubled: custody.Custody, http_: Http) -> None:
    assert "2 dead letters" in text(http_, GROUP + "/dead")
    assert "1 dead letter" in text(http_, GROUP + "/dead?key=A")
    assert "No dead letter matches" in text(http_, GROUP + "/dead?where_error=Value%25")
    assert http_.get(GROUP + "/dead?partition=x").status == 422
    letter = text(http_, GROUP + "/dead/0/0")
    for said in ("in raised", "TimeoutError: no answer", "north", "order"):
        assert said in letter
    assert http_.get(GROUP + "/dead/0/5").status == 404


def test_a_download_has_all_letters(troubled: custody.Custody, http_: Http) -> None:
    answer = http_.get(GROUP + "/dead.ndjson?key=B")
    assert answer.headers["content-disposition"] == 'attachment; filename="dead-orders-billing.ndjson"'
    (letter,) = [json.loads(line) for line in answer.body.splitlines()]
    assert (letter["key"], letter["payload"], letter["last_error"]) == ("B", {"order": 0}, "TimeoutError: no answer")


def test_a_message_has_its_history_in_each_group(troubled: custody.Custody, http_: Http) -> None:
    found = http_.get("/ui/message?topic=orders&partition=0&offset=0")
    assert (found.status, found.headers["location"]) == (303, "/ui/topics/orders/messages/0/0")
    page = text(http_, found.headers["location"])
    assert page.count("<strong>claim</strong>") == 2
    assert "groups/billing" in page
    assert "groups/mail" in page
    assert http_.get(found.headers["location"] + "/payload").body == b'{"order":0}'
    assert http_.get("/ui/topics/orders/messages/0/99").status == 404
    assert "orders" in text(http_, "/ui/topics/orders")


def test_redrive_shows_what_it_would_do_first(troubled: custody.Custody, http_: Http) -> None:
    preview = submit(http_, GROUP + "/redrive", {"chosen": "0/0"})
    assert preview.status == 200
    assert "1 message" in preview.body.decode()
    assert len(troubled.dead("orders", "billing")) == 2, "a preview changes nothing"
    done = submit(http_, GROUP + "/redrive", {"chosen": "0/0", "step": "do", "reason": "fixed"})
    assert (done.status, done.headers["location"]) == (303, GROUP + "/dead?did=redrive&count=1")
    assert [one.offset for one in troubled.dead("orders", "billing")] == [1]
    assert "Redriven: 1 message(s)." in text(http_, done.headers["location"])
    (entry,) = [one for one in troubled.trace("orders", 0, 0, group="billing") if one.kind == "redrive"]
    assert entry.worker == "dashboard"


def test_discard_of_all_that_match(troubled: custody.Custody, http_: Http) -> None:
    fields = {"which": "filter", "key": "B"}
    assert "1 message" in submit(http_, GROUP + "/discard", fields).body.decode()
    assert submit(http_, GROUP + "/discard", {**fields, "step": "do"}).status == 303
    assert [one.key for one in troubled.dead("orders", "billing")] == ["A"]
    assert submit(http_, GROUP + "/discard", {"step": "do"}).status == 422, "nothing chosen is not everything"
    assert len(troubled.dead("orders", "billing")) == 1


def test_keys_and_groups_can_be_repaired(troubled: custody.Custody, http_: Http) -> None:
    assert "1 message(s)" in text(http_, submit(http_, GROUP[:-7] + "mail/retry", {"key": "A"}).headers["location"])
    assert "It stays dead" in submit(http_, GROUP + "/release", {"key": "A"}).body.decode()
    assert len(troubled.blocked_keys("orders", "billing")) == 2
    submit(http_, GROUP + "/release", {"key": "A", "step": "do"})
    submit(http_, GROUP + "/skip", {"partition": 0, "offset": 1, "step": "do"})
    assert {one.blocked_by for one in troubled.blocked_keys("orders", "billing")} == {None}, "the next claim takes them"
    submit(http_, GROUP + "/pause", {"reason": "the shop is closed"})
    assert "the shop is closed" in text(http_, GROUP)
    submit(http_, GROUP + "/resume")
    assert troubled.stats("orders", "billing").paused_at is None


def test_a_rewind_is_previewed(troubled: custody.Custody, http_: Http) -> None:
    assert "From offset" in text(http_, GROUP + "/rewind")
    preview = submit(http_, GROUP + "/rewind", {"to_offset": 0, "partition": ""}).body.decode()
    assert "6 messages" in preview
    assert troubled.stats("orders", "billing").dead == 2
    assert submit(http_, GROUP + "/rewind", {"to_offset": 0, "step": "do"}).status == 303
    assert troubled.stats("orders", "billing").dead == 0


def test_a_schedule_is_paused_resumed_and_run(c: custody.Custody, http_: Http) -> None:
    c.create_topic("reports")
    c.create_schedule("nightly", topic="reports", cron="0 3 * * *")
    assert "nightly" in text(http_, "/ui/schedules")
    for action, said in (("pause", "is paused"), ("resume", "goes on"), ("run", "was published")):
        moved = submit(http_, f"/ui/schedules/nightly/{action}")
        assert said in text(http_, moved.headers["location"])
        assert c.schedule("nightly").state == ("paused" if action == "pause" else "active"), action
    assert c.topic("reports").message_count == 1


def test_unknown_pages_and_groups_are_pages_too(http_: Http) -> None:
    for path in ("/ui/nothing", "/ui/topics/none", "/ui/topics/none/groups/g"):
        answer = http_.get(path)
        assert answer.status == 404
        assert b"<h1>" in answer.body
    assert http_("DELETE", "/ui").status == 405
