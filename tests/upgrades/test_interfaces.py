"""What is kept for code of earlier releases."""

from __future__ import annotations

import psycopg

from custody.store import functions, interfaces


def test_this_release_keeps_what_the_releases_beside_it_need_and_no_more(database_url: str) -> None:
    files = functions.resources.files("custody.store").joinpath("sql")
    kept = {int(one.name[:-5]) for one in files.joinpath("interfaces").iterdir() if one.name.endswith(".json")}
    assert kept == set(interfaces.earlier()), "make interface writes one for each release"
    former = {int(one.name.partition("_")[0]) for one in files.joinpath("former").iterdir() if "_" in one.name}
    assert former <= kept, "functions for releases that do not work beside this one any more"
    with psycopg.connect(database_url, autocommit=True) as connection:
        for release in interfaces.earlier():
            assert interfaces.unanswered(connection, release) == []
