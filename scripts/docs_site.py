"""Hooks of mkdocs (`make docs`): reference pages made of the code, the list of decisions, links to files outside of
docs/, and llms.txt."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import custody
import custody.aio
from custody import errors
from custody.cli.app import command
from custody.http.app import OPERATIONS
from custody.http.openapi import describe

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))  # mkdocs loads this file by its path
import llms  # noqa: E402

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!docs/)[^)]*\)")
"""A link to a file of the repository that the site does not have."""
NAMED = re.compile(r"^```(\w+) (\S+)$", re.MULTILINE)
"""A block of code with the name of its file, which the site shows as its title."""
PYTHON = {
    "custody": custody.__all__,
    "custody.aio": custody.aio.__all__,
    "custody.outbox": ["write", "lock", "install", "Outbox"],
    "custody.relay": ["Relay", "Publisher", "WebhookPublisher", "CustodyPublisher", "FunctionPublisher"],
    "custody.spark.pipeline": ["Pipeline"],
    "custody.spark.outside.sinks": ["Files"],
    "custody.testing": ["drain", "server"],
    "custody.django": ["client", "close", "publish_on_commit", "write_event"],
}
"""What the Python reference has."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    decisions = [{title(path): f"decisions/{path.name}"} for path in sorted(ROOT.glob("docs/decisions/*.md"))]
    assert config.nav is not None
    internals: list[Any] = next(section["Internals"] for section in config.nav if "Internals" in section)
    internals.append({"Decisions": decisions})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {
        "reference/python.md": python_reference(),
        "reference/commands.md": command_reference(),
        "reference/http.md": http_reference(),
        "reference/errors.md": error_reference(),
    }
    assert config.nav is not None
    pages["llms.txt"] = llms.index(config.nav, ROOT / "docs", config.site_description or "", pages)
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return NAMED.sub(r'```\1 title="\2"', OUTSIDE.sub(r"\1", markdown))


def title(path: Path) -> str:
    """The first heading of a page, without a number."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return re.sub(r"^# (\d+\. )?", "", first)


def python_reference() -> str:
    lines = ["# Python reference", "", "Everything here is made of the docstrings."]
    for module, names in PYTHON.items():
        lines += ["", f"## {module.removesuffix('.pipeline').removesuffix('.outside.sinks')}"]
        lines += [line for name in names for line in ("", f"::: {module}.{name}")]
    return "\n".join(lines) + "\n"


def command_reference() -> str:
    lines = ["# Commands", "", "What `--help` prints. [The command line](../cli.md) explains it by task."]
    return "\n".join([*lines, *_commands(command(), "custody")]) + "\n"


def _commands(of: Any, path: str) -> Iterator[str]:
    context = of.make_context(path, [], resilient_parsing=True)
    yield from ("", f"## {path}", "", cell(of.help or of.get_short_help_str(300), lines=True))
    rows = [row for row in map(_parameter(context), of.get_params(context)) if row]
    if rows:
        yield from ("", "| argument or option | |", "| --- | --- |", *rows)
    for name in sorted(getattr(of, "commands", {})):
        yield from _commands(of.commands[name], f"{path} {name}")


def _parameter(context: Any) -> Any:
    def row(parameter: Any) -> str:
        found = parameter.get_help_record(context)
        return f"| `{' '.join(found[0].split())}` | {cell(found[1])} |" if found else ""

    return row


def http_reference() -> str:
    document = msgspec.json.decode(describe(OPERATIONS))
    lines = [
        "# HTTP operations",
        "",
        "The operations of `custody serve`, by tag. A running server has the whole description at `/openapi.json` and "
        "`/docs`. [The HTTP API](../http.md) explains it by task.",
    ]
    by_tag: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(operation["tags"][0], []).append((method.upper(), path, operation))
    for tag, operations in by_tag.items():
        lines += ["", f"## {tag}"]
        for method, path, operation in operations:
            lines += ["", f"### `{method} {path}`", "", operation["summary"], "", operation["description"]]
            rows = [f"| `{one['name']}` | {cell(one['description'])} |" for one in operation["parameters"]]
            if rows:
                lines += ["", "| parameter | |", "| --- | --- |", *rows]
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
            if body is not None:
                lines += ["", "```json", msgspec.json.format(msgspec.json.encode(body), indent=2).decode(), "```"]
    return "\n".join(lines) + "\n"


def error_reference() -> str:
    lines = [
        "# Errors",
        "",
        "Every error has a code, a message and a remedy. The code is the same in Python, SQL, JSON and on the command "
        "line. A `Transient` error may succeed when the same call is made again; a `Terminal` one will not.",
        "",
        "| code | class | HTTP | retry | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kind in sorted(_kinds(errors.CustodyError), key=lambda kind: kind.code):
        again = "yes" if issubclass(kind, errors.Transient) else "no"
        meaning = cell(inspect.getdoc(kind) or "")
        lines.append(f"| `{kind.code}` | `{kind.__name__}` | {kind.status} | {again} | {meaning} |")
    return "\n".join(lines) + "\n"


def _kinds(of: type[errors.CustodyError]) -> Iterator[type[errors.CustodyError]]:
    """It and those derived from it that have a code of their own."""
    if "code" in vars(of):
        yield of
    for kind in of.__subclasses__():
        yield from _kinds(kind)


def cell(text: str, *, lines: bool = False) -> str:
    """Text for a table, or with `lines` for a paragraph: `<` and `|` do not end it."""
    text = text.replace("<", "&lt;")
    return text if lines else " ".join(text.split()).replace("|", "\\|")
