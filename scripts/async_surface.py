"""Write src/custody/aio/derived: the verbs of the façade as coroutines. Each has the signature and the docstring of the
blocking one, which it calls.

It reads the source files without importing them. `--check` writes nothing and exits 1 if a file is out of date.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "custody"
TARGET = SOURCE / "aio" / "derived"


@dataclass(frozen=True)
class Part:
    """A class with verbs, and the class that is made of it."""

    source: str
    name: str
    target: str
    base: str
    """Its base classes, with the module of each."""

    @property
    def module(self) -> str:
        return "custody." + self.source.removesuffix(".py").replace("/", ".")


FUNCTIONS = {
    "outbox.py": ("outbox/__init__.py", ("write", "lock")),
    "once.py": ("verbs/once.py", ("once", "forget_once")),
}
"""Functions, by the module that is made of them."""
BASE = "custody.aio.base.Base"
TOPICS = "custody.aio.derived.topics.Topics"
GROUPS = "custody.aio.derived.groups.Groups"
PARTS = (
    Part("verbs/claim.py", "Lease", "lease.py", "custody.aio.live.LiveLease"),
    Part("verbs/transactions.py", "Transactions", "transactions.py", "custody.aio.live.LiveTransactions"),
    Part("verbs/transactions.py", "Transaction", "transaction.py", "custody.aio.live.LiveTransaction"),
    Part("verbs/producer.py", "IdempotentProducer", "producer.py", "custody.aio.live.LiveProducer"),
    Part("verbs/settle.py", "SettleVerbs", "settle.py", BASE),
    Part("engine/topics.py", "Topics", "topics.py", BASE),
    Part("engine/groups.py", "Groups", "groups.py", BASE),
    Part("engine/publishing.py", "Publishing", "publishing.py", TOPICS),
    Part("engine/producers.py", "Producers", "producers.py", "custody.aio.derived.publishing.Publishing"),
    Part("engine/schedules.py", "Schedules", "schedules.py", BASE),
    Part(
        "engine/consuming.py",
        "Consuming",
        "consuming.py",
        f"custody.aio.derived.settle.SettleVerbs custody.aio.derived.schedules.Schedules {TOPICS}",
    ),
    Part("engine/ensuring.py", "Ensuring", "ensuring.py", f"{GROUPS} {TOPICS}"),
    Part("engine/dead_letters.py", "DeadLetters", "dead_letters.py", BASE),
    Part("engine/key_states.py", "KeyStates", "key_states.py", BASE),
    Part("engine/operating.py", "Operating", "operating.py", BASE),
    Part(
        "engine/surveying.py",
        "Surveying",
        "surveying.py",
        "custody.aio.derived.operating.Operating custody.aio.derived.schedules.Schedules",
    ),
    Part("engine/apikeys.py", "ApiKeys", "apikeys.py", BASE),
)
LIVE = {part.name: f"custody.aio.derived.{part.target.removesuffix('.py')}" for part in PARTS[:4]}
"""Classes whose objects have verbs too: a coroutine takes and returns the asynchronous ones."""
WITHOUT_WAITING = {"hint"}
LEFT_OUT = {
    "work": "written by hand: its handlers run on the caller's loop",
    "worker_for": "`work` is a task, which is cancelled",
    "transaction": "written by hand: it begins when it is entered",
    "drive": "of pipelines on Spark",
    "driver_verbs": "of pipelines on Spark",
    "figures": "of pipelines on Spark",
    "tick": "workers and servers publish the ticks of schedules",
    "ticking": "workers and servers publish the ticks of schedules",
    "server": "`custody doctor` asks for it",
}
"""Methods that are not derived, and why."""


def derived(part: Part) -> str:
    """The text of a derived module."""
    tree = ast.parse((SOURCE / part.source).read_text(encoding="utf-8"))
    source = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == part.name)
    methods = [node for node in source.body if isinstance(node, ast.FunctionDef) and _is_verb(node)]
    body = "\n\n".join(_method(node) for node in methods)
    bases = part.base.split()
    names = {name for node in methods for name in _names(node)}
    imports = [*_imports(tree, part, names), "from custody.bridge import run"]
    imports += [f"from {base.rpartition('.')[0]} import {base.rpartition('.')[2]}" for base in bases]
    if "give_back(" in body or "give_back)" in body:
        imports.append("from custody.aio.live import give_back")
    if "blocking(" in body:
        imports.append("from custody.aio.live import blocking")
    about = ast.get_docstring(source, clean=False) or ""
    return (
        f'"""`{part.name}` of {part.source} for asyncio. Made by scripts/async_surface.py: do not edit."""\n\n'
        "from __future__ import annotations\n\n"
        + "\n".join(imports)
        + f"\n\n\nclass {part.name}({', '.join(base.rpartition('.')[2] for base in bases)}):\n"
        + f'    """{about}"""'
        + f"\n\n{body}\n"
    )


def derived_functions(source: str, wanted: tuple[str, ...]) -> str:
    """The text of a derived module of functions."""
    tree = ast.parse((SOURCE / source).read_text(encoding="utf-8"))
    nodes = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    module = "custody." + source.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    imports = [line for name in wanted for line in (f"from {module} import {name} as blocking_{name}",)]
    imports += [*_imports(tree, Part(source, "", "", ""), {name for node in nodes for name in _names(node)})]
    return (
        f'"""Functions of {source} for asyncio. Made by scripts/async_surface.py: do not edit."""\n\n'
        "from __future__ import annotations\n\n"
        + "\n".join([*imports, "from custody.bridge import run"])
        + "\n\n\n"
        + "\n\n".join(_function(node) for node in nodes)
        + "\n"
    )


def _function(node: ast.FunctionDef) -> str:
    call = f"blocking_{node.name}({', '.join(_arguments(node.args, first=0))})"
    document = ast.get_docstring(node, clean=False)
    lines = [f"async def {node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns or ast.Constant(None))}:"]
    return "\n    ".join([*lines, f'"""{document}"""', f"return await run(lambda: {call})"])


def _is_verb(node: ast.FunctionDef) -> bool:
    return not node.name.startswith("_") and node.name not in LEFT_OUT


def _decorated(node: ast.FunctionDef, name: str) -> bool:
    return any(ast.unparse(one) == name for one in node.decorator_list)


def _method(node: ast.FunctionDef) -> str:
    result = "None" if node.returns is None else ast.unparse(node.returns)
    signature = f"def {node.name}({ast.unparse(node.args)}) -> {result}:"
    document = ast.get_docstring(node, clean=False)
    lines = [f'"""{document}"""'] if document else []
    if _decorated(node, "property"):
        head = ["@property", signature]
        lines.append(f"return {_wrapped(result, f'self._of.{node.name}')}")
    elif _decorated(node, "overload"):
        head = ["@overload", f"async {signature}"]
        lines.append("...")
    else:
        call = f"self._of.{node.name}({', '.join(_arguments(node.args))})"
        if node.name in WITHOUT_WAITING:
            head = [signature]
            lines.append(f"return {call}")
        else:
            head = [f"async {signature}"]
            undo = ", undo=give_back" if result == "Lease" else ""
            lines.append(f"return {_wrapped(result, f'await run(lambda: {call}{undo})')}")
    return "\n".join([*(f"    {line}" for line in head), *(f"        {line}" for line in lines)])


def _wrapped(result: str, expression: str) -> str:
    return f"{result}({expression})" if result in LIVE else expression


def _arguments(of: ast.arguments, first: int = 1) -> Iterator[str]:
    """The arguments that pass on each parameter, from the first one on."""
    for one in of.args[first:]:
        yield _value(one)
    if of.vararg is not None:
        yield f"*{of.vararg.arg}"
    for one in of.kwonlyargs:
        yield f"{one.arg}={_value(one)}"
    if of.kwarg is not None:
        yield f"**{of.kwarg.arg}"


def _value(parameter: ast.arg) -> str:
    named = {node.id for node in ast.walk(parameter) if isinstance(node, ast.Name)}
    return f"blocking({parameter.arg})" if named & LIVE.keys() else parameter.arg


def _names(node: ast.FunctionDef) -> Iterator[str]:
    """The names in a signature and its decorators that stay."""
    for part in (node.args, node.returns):
        if part is not None:
            yield from (one.id for one in ast.walk(part) if isinstance(one, ast.Name))
    if _decorated(node, "overload"):
        yield "overload"


def _imports(tree: ast.Module, part: Part, names: set[str]) -> Iterator[str]:
    """The imports of these names: from where the source has them, or from the source."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            for one in node.names:
                if (one.asname or one.name) in names - LIVE.keys():
                    yield f"from {node.module} import {one.name}" + (f" as {one.asname}" if one.asname else "")
    own = {_defined(node) for node in tree.body} & names - LIVE.keys()
    if own:
        yield f"from {part.module} import {', '.join(sorted(own))}"
    for name in sorted(names & LIVE.keys() - {part.name}):
        yield f"from {LIVE[name]} import {name}"


def _defined(node: ast.stmt) -> str:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return ""


def formatted(text: str, path: Path) -> str:
    """The text in the house format, with the imports in order."""
    ruff = [sys.executable, "-m", "ruff"]
    for command in (
        ["check", "--fix-only", "--select", "I", "--quiet", "--stdin-filename", str(path), "-"],
        ["format", "--quiet", "--stdin-filename", str(path), "-"],
    ):
        done = subprocess.run([*ruff, *command], input=text, capture_output=True, text=True, check=True, cwd=ROOT)
        text = done.stdout
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    check = parser.parse_args().check
    stale = []
    texts = {part.target: derived(part) for part in PARTS}
    texts |= {target: derived_functions(*what) for target, what in FUNCTIONS.items()}
    for target, written in texts.items():
        path = TARGET / target
        text = formatted(written, path)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
            if not check:
                path.write_text(text, encoding="utf-8")
    if check and stale:
        print(f"out of date, run `make async`: {', '.join(str(path.relative_to(ROOT)) for path in stale)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
