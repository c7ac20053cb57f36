"""Every link of the documents leads to a file, and to a heading in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.md")])
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """As GitHub names headings: in small letters, without punctuation, with dashes for spaces."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", document.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_links_of_a_document_lead_somewhere(document: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", document.read_text("utf-8"))):
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            broken.append(link)
    assert broken == []
