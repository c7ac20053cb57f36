"""llms.txt names every page of the site with one whole sentence."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from scripts import llms

ROOT = Path(__file__).parents[2]
REFERENCE = ("python", "commands", "http", "errors")
MADE = {f"reference/{name}.md": f"# {name}\n\nWhat is made of the code.\n" for name in REFERENCE}


def test_every_page_is_there_with_its_first_sentence() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    site = yaml.safe_load(text)
    index = llms.index(site["nav"], ROOT / "docs", site["site_description"], MADE)
    lines = re.findall(r"^- \[(.+)\]\((.+)\.html\): (.+)$", index, re.MULTILINE)
    assert {name for _, name, _ in lines} == set(re.findall(r": ([\w/-]+)\.md$", text, re.MULTILINE))
    for title, _, sentence in lines:
        assert re.fullmatch(r"[A-Z`].{15,260}\.", sentence), f"{title}: {sentence}"
        assert not re.search(r"\]\(|\*\*", sentence), f"{title}: {sentence}"


def test_the_first_sentence() -> None:
    code = "```text\nx\n```"
    assert llms.first_sentence(f"# T\n\n{code}\n\nA **log** of [one](a.md)\nthing. More.") == "A log of one thing."
    assert llms.first_sentence("# T\n\n| a |\n| - |\n\nSee this: `x`.\n\nMore.") == "See this."
