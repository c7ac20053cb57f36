"""Take the screenshots of docs/dashboard.md: the sample data of the browser tests, in Chromium.

It needs Chromium (apt-get install chromium), and writes docs/pictures/dashboard-*.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.browser.chromium import chromium, found
from tests.browser.sample import fill
from tests.http.conftest import served

import custody
from custody.testing.server import server

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
GROUP = "/ui/topics/orders/groups/billing"
SHOTS = (
    ("overview", "/ui", 1280, "light"),
    ("overview-small", "/ui", 400, "dark"),
    ("group", GROUP, 1280, "dark"),
    ("dead", GROUP + "/dead", 1280, "light"),
)


def main() -> int:
    program = found()
    if program is None:
        print("Chromium is not installed: apt-get install chromium", file=sys.stderr)
        return 2
    with (
        server() as databases,
        databases.database() as url,
        custody.connect(url, worker="worker-1") as c,
        served(c) as http,
        chromium(program) as browser,
    ):
        fill(c)
        for name, path, width, scheme in SHOTS:
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page = context.new_page()
            page.goto(http.url + path)
            c.publish_many("stock", [custody.Outgoing({"n": number}) for number in range(60)])
            page.wait_for_timeout(2500)  # an update later there are rates and lines
            page.screenshot(path=PICTURES / f"dashboard-{name}.png", full_page=name == "group")
            context.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
