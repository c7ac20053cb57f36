"""A real project of Django, made of docs/django.md: what startproject makes, and the snippets of the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from tests.databases import Copy

import custody

PAGE = Path(__file__).parents[2] / "docs" / "django.md"
FILE = re.compile(r"^```python\n# (\S+\.py)(: add to it)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STARTED = """
from django.core.management import call_command
call_command("startproject", "mysite", ".")
call_command("startapp", "shop")
"""
"""What the two commands of the page do, in one process."""


def made_of_the_page(directory: Path) -> None:
    """The project, in a directory."""
    subprocess.run([sys.executable, "-c", STARTED], cwd=directory, check=True)
    for name, more, code in FILE.findall(PAGE.read_text(encoding="utf-8")):
        file = directory / name
        assert file.exists() == bool(more) or name == "shop/models.py", name
        file.write_text((file.read_text(encoding="utf-8") if more else "") + code, encoding="utf-8")


def variables_of(url: str) -> dict[str, str]:
    """The variables that the settings of the page read."""
    parts = conninfo_to_dict(url)
    given = {"PGDATABASE": "dbname", "PGUSER": "user", "PGPASSWORD": "password", "PGHOST": "host", "PGPORT": "port"}
    return {variable: str(parts.get(name) or "") for variable, name in given.items()}


@pytest.fixture(scope="session")
def project_url(server_url: str) -> Iterator[str]:
    """The database of the project; nothing is in it."""
    with closing(Copy(server_url)) as copy:
        yield copy.url


@pytest.fixture(scope="session")
def project(project_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of the project, with Django set up in this process (that can be done once) and the tables made."""
    directory = tmp_path_factory.mktemp("project")
    _forget_modules()
    made_of_the_page(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        for name in [name for name in os.environ if name.startswith("CUSTODY_")]:
            patch.delenv(name)
        for name, value in {**variables_of(project_url), "DJANGO_SETTINGS_MODULE": "mysite.settings"}.items():
            patch.setenv(name, value)
        from django.core.management import call_command

        import django

        django.setup()
        call_command("makemigrations", "shop", verbosity=0)
        call_command("migrate", verbosity=0)
        for name in variables_of(project_url):
            patch.delenv(name)
        patch.delenv("DJANGO_SETTINGS_MODULE")
        yield directory
        from django.db import connections

        from custody.django import close

        close()
        connections.close_all()
    _forget_modules()


def _forget_modules() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mysite", "shop")]:
        del sys.modules[name]


@pytest.fixture
def shop(project: Path, project_url: str) -> Iterator[custody.Custody]:
    """The client of the project, with tables without rows."""
    from django.db import connections

    from custody.django import client, close

    yield client()
    for topic in client().topics():
        client().delete_topic(topic.name)
    with psycopg.connect(project_url, autocommit=True) as connection:
        connection.execute("TRUNCATE shop_order, shop_parcel, auth_user CASCADE")
        connection.execute("DROP TABLE IF EXISTS custody_once")
    close()
    connections.close_all()
