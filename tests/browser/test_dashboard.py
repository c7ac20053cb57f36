"""What an operator sees and does in a browser: pages with real data, repairs, hostile texts, a database that stops."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from tests.browser.conftest import Open
from tests.browser.sample import raised
from tests.http.conftest import Http, served

import custody
from custody.store import embedded

pytestmark = [pytest.mark.browser, pytest.mark.own_database, pytest.mark.req("N6")]

GROUP = "/ui/topics/orders/groups/billing"
AXE = (resources.files("axe_playwright_python") / "axe.min.js").read_text()
EVERY = ("/ui", "/ui/topics", "/ui/topics/orders", "/ui/workers", "/ui/schedules", "/ui/outbox", "/ui/message", GROUP)


def fits(page: Page) -> None:
    """Nothing makes the page wider than the window."""
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, f"{page.url} is {wide} pixels too wide"


def test_every_page_fits_and_axe_finds_nothing_serious(shop: custody.Custody, site: Http, open_page: Open) -> None:
    letter = shop.dead("orders", "billing", limit=1)[0]
    place = f"{letter.partition}/{letter.offset}"
    paths = [*EVERY, f"{GROUP}/dead", f"{GROUP}/dead/{place}", f"/ui/topics/orders/messages/{place}", GROUP + "/rewind"]
    for width, scheme in ((1280, "light"), (400, "dark")):
        page = open_page(width, scheme)
        for path in paths:
            page.goto(site.url + path)
            fits(page)
            page.evaluate(AXE)
            found = page.evaluate("axe.run().then(one => one.violations)")
            serious = [
                (one["id"], [node["html"][:200] for node in one["nodes"][:3]])
                for one in found
                if one["impact"] in ("serious", "critical")
            ]
            assert serious == [], f"{path} at {width}, {scheme}"


def test_the_overview_shows_changes_by_itself(shop: custody.Custody, site: Http, open_page: Open) -> None:
    page = open_page()
    page.goto(site.url)
    expect(page).to_have_url(site.url + "/ui")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="parcels/ledger", exact=True))
    expect(row).to_contain_text("ok")
    page.get_by_role("link", name="parcels/ledger", exact=True).focus()
    shop.pause("parcels", "ledger")
    expect(row).to_contain_text("paused")
    focused = page.evaluate("document.activeElement.id")
    assert focused == "of-parcels-ledger", "an update leaves the focus where it is"
    page.get_by_role("button", name="Pause updates").click()
    shop.resume("parcels", "ledger")
    page.wait_for_timeout(2500)  # longer than an update takes
    expect(row).to_contain_text("paused")
    page.get_by_role("button", name="Updates paused").click()
    expect(row).to_contain_text("ok")


def test_two_hundred_groups_stay_readable(shop: custody.Custody, site: Http, open_page: Open) -> None:
    for number in range(200):
        shop.create_group("parcels", f"shop-{number:03}")
    page = open_page()
    page.goto(site.url + "/ui")
    expect(page.get_by_text("209 groups")).to_be_visible()
    first = page.get_by_role("row").nth(1)
    expect(first.locator(".chip")).not_to_have_class(re.compile("good"))
    page.get_by_label("Search").fill("shop-07")
    expect(page.get_by_text("10 groups of 209")).to_be_visible()
    expect(page).to_have_url(re.compile(r"q=shop-07"))
    shop.pause("parcels", "shop-077")
    expect(page.get_by_role("row").nth(1)).to_contain_text("shop-077")
    page.get_by_label("only in trouble").check()
    expect(page.get_by_text("1 group of 209")).to_be_visible()


def test_redrive_from_click_to_done(shop: custody.Custody, site: Http, open_page: Open) -> None:
    page = open_page()
    page.goto(site.url + "/ui")
    page.get_by_role("link", name="2 dead letters of orders/billing").click()
    expect(page.get_by_role("button", name="Redrive chosen")).to_be_disabled()
    page.get_by_label("Choose all on this page").check()
    page.get_by_role("button", name="Redrive chosen").click()
    expect(page.get_by_role("heading", name="Redrive dead letters")).to_be_visible()
    expect(page.get_by_text("no answer of payments.example").first).to_be_visible()
    assert len(shop.dead("orders", "billing")) == 2, "nothing has happened yet"
    page.get_by_label("Reason").fill("payments.example is back")
    page.get_by_role("button", name="Redrive 2 messages").click()
    expect(page.get_by_role("status")).to_have_text("Redriven: 2 message(s).")
    expect(page.get_by_text("Nothing is dead here.")).to_be_visible()
    while lease := shop.claim("orders", "billing", max_messages=500):
        lease.ack()
    assert shop.stats("orders", "billing").dead == 0
    page.goto(site.url + "/ui")
    expect(page.get_by_role("link", name="orders/billing", exact=True)).to_be_visible()
    expect(page.get_by_text("dead letters", exact=True).locator("visible=true")).to_have_count(1)  # the tile


def test_a_blocked_key_is_explained_and_repaired_by_keyboard(
    shop: custody.Custody, site: Http, open_page: Open
) -> None:
    page = open_page(400)
    page.goto(site.url + GROUP)
    blocked = page.get_by_role("listitem").filter(has_text="SKU-2")
    expect(blocked).to_contain_text("failing since")
    expect(blocked).to_contain_text("TimeoutError: no answer of payments.example for SKU-2")
    expect(blocked).to_contain_text("behind it")
    blocked.get_by_role("button", name="Retry now").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).to_have_text("Due now: 1 message(s) that waited for a retry.")
    page.goto(site.url + GROUP + "/rewind")
    page.get_by_label("From offset").fill("0")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Rewind")).to_be_visible()
    page.get_by_role("button", name=re.compile("Rewind [0-9,]+ messages")).click()
    expect(page.get_by_role("status")).to_contain_text("are delivered again")


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param({"html": "<script>document.title='taken'</script><img src=x onerror=alert(1)>"}, id="markup"),
        pytest.param("abc \u202egnp.exe \u2066 \x07 end", id="right to left"),
        pytest.param(bytes(range(256)) * 40, id="binary"),
        pytest.param("<b>" * 350_000, id="a megabyte"),
    ],
)
def test_a_hostile_payload_is_only_text(shop: custody.Custody, site: Http, open_page: Open, payload: object) -> None:
    shop.create_topic("hostile")
    text = "<script>document.title='taken'</script>\u202e"
    shop.create_group("hostile", "all", custody.Policy(max_attempts=1))
    shop.publish("hostile", payload, key=text, headers={text: text})
    shop.claim("hostile", "all").nack(error=raised(text))
    page = open_page(400)
    group = "/ui/topics/hostile/groups/all"
    for path in ("/ui", group, f"{group}/dead", f"{group}/dead/0/0", "/ui/topics/hostile/messages/0/0"):
        page.goto(site.url + path)
        assert "taken" not in page.title()
        assert page.locator("main script, main img").count() == 0
        assert "\u202e" not in page.locator("main").inner_text()
        fits(page)
    expect(page.get_by_label("Payload")).to_be_visible()


@pytest.mark.req("G19")
def test_a_browser_logs_in_and_out(shop: custody.Custody, open_page: Open) -> None:
    viewer = shop.create_api_key("viewer", consume=["orders"]).secret
    with served(shop) as http:
        page = open_page()
        page.goto(http.url + GROUP)
        page.get_by_label("API key").fill("cus_wrong")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("alert").first).to_contain_text("unknown, revoked or expired")
        page.get_by_label("API key").fill(viewer)
        page.keyboard.press("Enter")
        expect(page).to_have_url(http.url + GROUP)
        expect(page.get_by_text("SKU-2", exact=True)).to_be_visible()
        expect(page.get_by_role("button", name="Pause", exact=True)).to_have_count(0)
        (cookie,) = page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Lax")
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_label("API key")).to_be_visible()


def test_a_page_comes_back_with_the_database(base: Path, open_page: Open) -> None:
    home = base / "home"
    with embedded.acquire(home) as server, custody.connect(server.url) as c:
        c.create_topic("orders")
        c.create_group("orders", "billing")
        with served(c) as http:
            page = open_page()
            page.goto(http.url + "/ui")
            expect(page.get_by_role("link", name="orders/billing", exact=True)).to_be_visible()
            embedded.stop(home, "immediate")
            expect(page.get_by_role("heading", name="The database does not answer")).to_be_visible(timeout=60_000)
            with embedded.acquire(home):
                expect(page.get_by_role("link", name="orders/billing", exact=True)).to_be_visible(timeout=60_000)


def test_a_page_says_when_the_server_is_gone(shop: custody.Custody, open_page: Open) -> None:
    page = open_page()
    with served(shop) as http:
        page.goto(http.url + "/ui")
        expect(page.get_by_role("link", name="orders/billing", exact=True)).to_be_visible()
    expect(page.get_by_text("The server does not answer")).to_be_visible()
    expect(page.get_by_role("link", name="orders/billing", exact=True)).to_be_visible()
