"""The repository keeps its own promises: pins, no registry addresses, a fresh table of requirements."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Put together from parts, so that this file does not hold what it looks for.
REGISTRY_HOSTS = ["py" + "pi", "python" + "hosted", "npm" + "js", "artifact" + "ory", "ne" + "xus", "devpi" + "."]
REGISTRY_ADDRESS = re.compile(r"\w+://[^\s\"'<>]*(?:" + "|".join(map(re.escape, REGISTRY_HOSTS)) + ")", re.IGNORECASE)
REGISTRY_OPTION = re.compile("|".join(["--(?:extra-)?index" + "-url", "--find" + "-links", "--trusted" + "-host"]))


def requirements_script(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts/requirements.py", "--root", root, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def repository_files() -> list[Path]:
    """The files that are, or would be, committed."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_constraints_are_names_and_versions_only() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert lines == sorted(set(lines))
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][A-Za-z0-9.+!]*", line)] == []


def test_no_file_holds_the_address_of_a_registry() -> None:
    found = []
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}"
            for number, line in enumerate(text.splitlines(), start=1)
            if REGISTRY_ADDRESS.search(line) or REGISTRY_OPTION.search(line)
        ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    ["https://" + "py" + "pi.org/simple", "http://mirror.example/" + "py" + "pi/web", "--index" + "-url x"],
)
def test_the_address_of_a_registry_would_be_noticed(line: str) -> None:
    assert REGISTRY_ADDRESS.search(line) or REGISTRY_OPTION.search(line)


def test_the_tables_of_the_docs_are_those_of_the_code() -> None:
    pages = [page for page in (ROOT / "docs").glob("*.md") if "<!-- made of: " in page.read_text(encoding="utf-8")]
    assert pages, "there are such tables"
    result = subprocess.run(
        [sys.executable, ROOT / "scripts/tables.py", "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_requirements_page_is_fresh() -> None:
    result = requirements_script("--check")
    assert result.returncode == 0, result.stderr


def a_repository(root: Path, test_file: str) -> Path:
    (root / "docs").mkdir()
    (root / "docs/requirements.toml").write_text('[sections]\nK = "Order"\n[K]\nK1 = "one"\nK2 = "two"\nK3 = "three"\n')
    (root / "tests").mkdir()
    (root / "tests/test_order.py").write_text(test_file)
    return root


def test_requirements_are_found_on_functions_classes_modules_parameters_and_state_machines(tmp_path: Path) -> None:
    root = a_repository(
        tmp_path,
        "pytestmark = pytest.mark.req('K1')\n"
        "class TestKeys:\n"
        "    @pytest.mark.parametrize('n', [pytest.param(1, marks=pytest.mark.req('K2'))])\n"
        "    def test_one(self, n): ...\n"
        "def helper(): ...\n"
        "TestMachine = pytest.mark.req('K2')(Machine.TestCase)\n",
    )
    assert requirements_script("--check", root=root).returncode == 1
    assert requirements_script(root=root).returncode == 0
    assert requirements_script("--check", root=root).returncode == 0
    page = (root / "docs/requirements.md").read_text()
    both = "`tests/test_order.py::TestKeys::test_one`<br>`tests/test_order.py::TestMachine`"
    assert f"| K1 | one | {both} |\n| K2 | two | {both} |\n| K3 | three | not yet |\n" in page
    assert "2 of 3 requirements have a test." in page


@pytest.mark.parametrize(
    ("mark", "complaint"), [("pytest.mark.req('K9')", "'K9'"), ("pytest.mark.req(*IDS)", "literal ids")]
)
def test_a_mark_that_names_no_requirement_is_refused(tmp_path: Path, mark: str, complaint: str) -> None:
    result = requirements_script(root=a_repository(tmp_path, f"@{mark}\ndef test_order(): ...\n"))
    assert result.returncode == 2
    assert complaint in result.stderr
