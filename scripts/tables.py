"""Write the tables of the docs that are made of the code: the part between `<!-- made of: NAME -->` and `<!-- end -->`.

`--check` writes nothing and exits 1 when one of them is stale.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from custody.cli import settings as command_line
from custody.model.outcomes import OUTCOMES, Counts
from custody.model.policy import Policy
from custody.model.retention import Retention
from custody.model.setting import Setting, Settings, settings_of
from custody.wire.settings import answered

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- made of: (.+?) -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)


def table(*rows: tuple[str, ...]) -> str:
    first, *rest = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([first, "|" + " --- |" * len(rows[0]), *rest])


def prose(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def literal(value: Any) -> str:
    """A default as it is written in Python."""
    if isinstance(value, Settings):
        found = [f"{one.name}={literal(getattr(value, one.name))}" for one in settings_of(type(value))]
        return f"{type(value).__name__}({', '.join(found)})"
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
        return f'"{seconds:g}s"' if seconds >= 1 else f'"{seconds * 1000:g}ms"'
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def policy_settings() -> str:
    rows = [(f"`{one.name}`", f"`{literal(one.default)}`", one.help) for one in settings_of(Policy)]
    return table(("setting", "default", "meaning"), *rows)


def options_of(kind: type[Settings], names: dict[str, str], *, none: bool) -> str:
    found = [f"`{command_line.usage(one, names.get(one.name, one.name), none=none)}`" for one in settings_of(kind)]
    return prose(f"{', '.join(found[:-1])} and {found[-1]}.")


def json_of(kind: type[Settings]) -> str:
    found = [_field(one) for one in settings_of(kind)]
    return prose(f"{', '.join(found[:-1])} and {found[-1]}.")


def _field(setting: Setting) -> str:
    inner = (
        "" if setting.nested is None else ", ".join(f"`{name}`" for name in answered(setting.nested).__struct_fields__)
    )
    return f"`{setting.name}`" + (f" ({inner})" if inner else "")


def outcomes() -> str:
    rows = [(f"`{kind}`", one.lease, one.raised, one.effect, f"`{one.counted}`") for kind, one in OUTCOMES.items()]
    return table(("outcome", "of a lease", "a handler raises", "the message is", "count"), *rows)


def counts() -> str:
    found = [f"`{one.name}`" for one in fields(Counts)]
    return prose(f"{', '.join(found[:-1])} and {found[-1]}.")


MADE: dict[str, Callable[[], str]] = {
    "the settings of a policy": policy_settings,
    "the options of a policy": lambda: options_of(Policy, {}, none=True),
    "the JSON of a policy": lambda: json_of(Policy),
    "the outcomes": outcomes,
    "the counts": counts,
    "the options of a retention": lambda: options_of(Retention, command_line.RETENTION, none=False),
}


def renewed(text: str) -> str:
    """A document with its tables as the code has them."""
    return MARKED.sub(lambda found: f"{found[1]}{MADE[found[2]]()}\n{found[4]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    stale = []
    check = parser.parse_args().check
    for page in sorted(ROOT.glob("docs/*.md")):
        text = page.read_text(encoding="utf-8")
        if renewed(text) != text:
            stale.append(page.name)
            if not check:
                page.write_text(renewed(text), encoding="utf-8")
    if check and stale:
        print(f"stale: {', '.join(stale)}; run `make tables`", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
