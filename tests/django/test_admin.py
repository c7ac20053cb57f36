"""The admin pages of the project of docs/django.md, fetched by Django's test client."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

import custody

if TYPE_CHECKING:
    from django.test import Client

pytestmark = pytest.mark.req("X12")

HOSTILE = "<script>alert('1')</script>&\"{{ 7*7 }}"
POLICY = custody.Policy(ordering="key", on_dead="hold", max_attempts=1)


@pytest.fixture
def orders(shop: custody.Custody) -> custody.Custody:
    shop.create_topic("orders")
    shop.create_group("orders", "parcels", POLICY)
    return shop


@pytest.fixture
def admin(shop: custody.Custody) -> Client:
    """The browser of a superuser."""
    from django.contrib.auth.models import User
    from django.test import Client

    browser = Client(SERVER_NAME="localhost")
    browser.force_login(User.objects.create_superuser("root"))
    return browser


def page(admin: Client, path: str, **parameters: str) -> str:
    answer = admin.get(f"/admin/custody/{path}", parameters, follow=True)
    assert answer.status_code == 200, answer
    return str(answer.content.decode())


def links(html: str, model: str) -> list[str]:
    return [f"{model}/{found}" for found in re.findall(rf'href="/admin/custody/{model}/([^"?]+/change/)', html)]


def die(c: custody.Custody, *messages: Any, key: str | None = None, error: str = "no") -> None:
    for message in messages:
        c.publish("orders", message, key=key, headers={"x-note": HOSTILE})
    while lease := c.claim("orders", "parcels", max_messages=100):
        lease.nack(error=error)


def test_hostile_content_is_escaped(orders: custody.Custody, admin: Client) -> None:
    payloads = [HOSTILE, {"html": HOSTILE}, HOSTILE.encode() + b"\x00\xff", "a\x00b", None, "x" * 50_000]
    die(orders, *payloads, error=HOSTILE)
    listed = page(admin, "deadletter/")
    assert len(links(listed, "deadletter")) == len(payloads)
    shown = [page(admin, link) for link in links(listed, "deadletter")]
    for html in [listed, *shown]:
        assert "<script>alert" not in html
        assert "&lt;script&gt;alert(" in html
    together = "\n".join(shown)
    assert "{{ 7*7 }}" in together
    assert "\\000\\377" in together, "bytes are escaped"
    assert "a\\000b" in together
    assert "x" * 20_000 + "\n… (the first 20,000 characters)" in together
    assert "x" * 20_001 not in together


def test_a_dead_letter_has_what_one_needs_to_know(orders: custody.Custody, admin: Client) -> None:
    orders.publish("orders", {"sku": "SKU-1"}, key="a/b #1")
    try:
        raise ValueError("not a number")
    except ValueError as error:
        orders.claim("orders", "parcels").nack(error=error)
    (link,) = links(page(admin, "deadletter/"), "deadletter")
    html = page(admin, link)
    for part in ("a/b #1", "not a number", "test_admin.py", "retries_exceeded", "{&quot;sku&quot;:&quot;SKU-1&quot;}"):
        assert part in html
    (blocked,) = links(page(admin, "blockedkey/"), "blockedkey")
    assert "held" in page(admin, blocked), "also of a key with characters that URLs do not have"


def test_groups_and_what_is_in_flight(orders: custody.Custody, admin: Client) -> None:
    orders.create_group("orders", "mail")
    die(orders, "dies")
    orders.publish("orders", "leased")
    lease = orders.claim("orders", "mail")
    groups = page(admin, "groupfigures/")
    assert 'href="/admin/custody/deadletter/?group=orders%2Fparcels">1</a>' in groups
    (link,) = links(page(admin, "inflight/"), "inflight")
    assert str(lease.lease_id) in page(admin, link)
    assert links(page(admin, "inflight/", group="orders/parcels"), "inflight") == []
    assert len(links(page(admin, "deadletter/", group="orders/parcels"), "deadletter")) == 1
    assert links(page(admin, "deadletter/", group="orders/mail"), "deadletter") == []
    assert "lag" in page(admin, links(groups, "groupfigures")[0])


def test_nothing_can_be_changed(orders: custody.Custody, admin: Client) -> None:
    from django.contrib import admin as site

    die(orders, "dies")
    (link,) = links(page(admin, "deadletter/"), "deadletter")
    assert "Save" not in page(admin, link)
    models = [model for model in site.site._registry if model._meta.app_label == "custody"]
    assert len(models) == 4
    for model in models:
        name = model._meta.model_name
        assert admin.get(f"/admin/custody/{name}/add/").status_code == 403
    for action in ("change", "delete"):
        assert (
            admin.post(f"/admin/custody/{link.replace('/change/', f'/{action}/')}", {"topic": "x"}).status_code == 403
        )
    assert len(orders.dead("orders", "parcels")) == 1


def test_who_may_look(orders: custody.Custody) -> None:
    from django.contrib.auth.models import Permission, User
    from django.test import Client

    user = User.objects.create_user("clerk", is_staff=True)
    browser = Client(SERVER_NAME="localhost")
    browser.force_login(user)
    assert browser.get("/admin/custody/deadletter/").status_code == 403
    names = sorted(one.codename for one in Permission.objects.filter(content_type__app_label="custody"))
    assert names == ["view_blockedkey", "view_deadletter", "view_groupfigures", "view_inflight"]
    user.user_permissions.add(Permission.objects.get(codename="view_deadletter"))
    assert browser.get("/admin/custody/deadletter/").status_code == 200
    assert browser.get("/admin/custody/inflight/").status_code == 403


def test_a_list_counts_no_more_than_it_shows(orders: custody.Custody, admin: Client) -> None:
    """The log is not read for a list, and rows beyond the first thousand are not counted."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    orders.publish_many("orders", [custody.Outgoing(n) for n in range(1_100)])
    die(orders)
    with CaptureQueriesContext(connection) as queries:
        html = page(admin, "deadletter/")
        statements = [one["sql"] for one in queries if "deliveries" in one["sql"]]
    assert "These are the first 1,000; there are more." in html
    assert len(links(html, "deadletter")) == 50
    assert len(links(page(admin, "deadletter/", p="20"), "deadletter")) == 50
    counting = [sql for sql in statements if "COUNT(" in sql]
    assert counting
    assert all("LIMIT 1001" in sql for sql in counting)
    with connection.cursor() as cursor:
        for sql in statements:
            cursor.execute(f"EXPLAIN (FORMAT JSON) {sql}")
            plan = json.dumps(cursor.fetchone()[0])
            assert "log_" not in plan
            assert "leases" not in plan


def test_found_by_key(orders: custody.Custody, admin: Client) -> None:
    die(orders, 1, key="SKU-1")
    die(orders, 2, key="SKU-2")
    assert len(links(page(admin, "deadletter/", q="SKU-2"), "deadletter")) == 1


def test_what_is_gone_or_never_was_is_not_found(orders: custody.Custody, admin: Client) -> None:
    die(orders, "dies")
    (link,) = links(page(admin, "deadletter/"), "deadletter")
    orders.redrive("orders", "parcels")
    for gone in (link, "deadletter/1/change/", "deadletter/_5B1_5D/change/", "deadletter/nonsense/change/"):
        answer = admin.get(f"/admin/custody/{gone}", follow=True)
        assert answer.redirect_chain == [("/admin/", 302)]
        assert "Perhaps it was deleted" in answer.content.decode()


def test_without_the_schema_or_a_connection_there_are_no_pages(
    orders: custody.Custody, admin: Client, project_url: str
) -> None:
    import psycopg
    from django.test.utils import override_settings

    with override_settings(CUSTODY={"DATABASE": project_url}):
        assert "/admin/custody/" not in admin.get("/admin/").content.decode()
        assert admin.get("/admin/custody/deadletter/").status_code == 403
    with psycopg.connect(project_url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA custody CASCADE")
    assert "Run `manage.py custody migrate`." in page(admin, "deadletter/")
    from custody.django import close

    close()
