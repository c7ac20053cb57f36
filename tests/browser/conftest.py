"""The dashboard of a real server in a real Chromium."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page
from tests.browser.chromium import chromium, found
from tests.browser.sample import fill
from tests.http.conftest import Http, serve, served

import custody

__all__ = ["serve"]

Open = Callable[..., Page]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = found()
    if program is None:
        say = "Chromium is not installed (apt-get install chromium): the dashboard was tested in no browser"
        if os.environ.get("CI") == "true":
            pytest.fail(say)
        pytest.skip(say)
    with chromium(program) as started:
        yield started


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens a page in a context of its own. Its scripts and the policy of the server must not complain."""
    complaints: list[str] = []

    def complain(text: str) -> None:
        # a connection or an answer that fails is part of some tests
        if "Failed to load resource" not in text and "ERR_CONNECTION" not in text and "htmx" not in text:
            complaints.append(text)

    def opened(width: int = 1280, scheme: str = "light") -> Page:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda said: complain(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complain(str(error)))
        return page

    yield opened
    for context in browser.contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def shop(database: object, database_url: str) -> Iterator[custody.Custody]:
    """Custody with the sample data, and the clock of the server: pages show ages."""
    with custody.connect(database_url, worker="worker-1") as c:
        fill(c)
        yield c


@pytest.fixture
def site(shop: custody.Custody) -> Iterator[Http]:
    with served(shop) as http:
        yield http
