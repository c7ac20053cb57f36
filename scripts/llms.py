"""llms.txt of the documentation site, as https://llmstxt.org describes it: every page with its first sentence, in the
order of the navigation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Page = tuple[str, str]
"""A title, and the file below docs/."""


def index(nav: list[Any], docs: Path, description: str, written: dict[str, str]) -> str:
    """The text of the file. `written` has pages that are made of the code, by their name."""
    lines = ["# Custody", "", f"> {description}."]
    for entry in nav:
        ((section, content),) = entry.items()
        pages = [(section, content)] if isinstance(content, str) else list(_pages(content))
        lines += ["", f"## {section}", ""]
        for title, name in pages:
            text = written.get(name) or (docs / name).read_text(encoding="utf-8")
            lines.append(f"- [{title}]({name.removesuffix('.md')}.html): {first_sentence(text)}")
    return "\n".join(lines) + "\n"


def _pages(content: list[Any]) -> Iterator[Page]:
    for entry in content:
        ((title, inner),) = entry.items()
        if isinstance(inner, str):
            yield title, inner
        else:
            yield from _pages(inner)


def first_sentence(text: str) -> str:
    """The first sentence of a page, as plain text."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    parts = (part.strip() for part in text.split("\n\n")[1:])
    paragraph = next(part for part in parts if part[:1].isalpha() or part.startswith(("**", "`")))
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(paragraph.split())).replace("**", "")
    return re.split(r"(?<=[^.][.:])\s+(?=[A-Z`*])", plain, maxsplit=1)[0].rstrip(":.") + "."
