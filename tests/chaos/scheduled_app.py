"""An app with two schedules that tick each second. Arguments: database URL, name of the worker."""

from __future__ import annotations

import sys

import custody

app = custody.App("shop")


@app.every("1s", missed="catch_up")
def interval() -> None: ...


@app.cron("* * * * * *", tz="Europe/Berlin", missed="catch_up")
def cron() -> None: ...


def main(url: str, name: str) -> None:
    with custody.connect(url, worker=name) as c:
        app.run(c)


if __name__ == "__main__":
    main(*sys.argv[1:])
