"""Look after the versions that constraints.txt pins.

`audit` asks pip-audit for known vulnerabilities of the pinned versions. It runs from an environment of its own, so that
Custody does not depend on it. `outdated` lists pins that have a newer release. Both need the network. The exit status
is 0 if there is nothing to report (newer releases are no fault), 1 for vulnerabilities, and 2 if it could not look.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "constraints.txt"
PIP_AUDIT = "pip-audit==2.10.1"
TIMEOUT = 600


def pins() -> dict[str, str]:
    lines = PINS.read_text(encoding="utf-8").split()
    return dict(line.split("==") for line in lines)


def could_not(what: str, said: str) -> NoReturn:
    """Nobody may take this for a clean result."""
    print(said.strip()[-2000:], file=sys.stderr)
    print(f"\n!! COULD NOT {what}. This is no result: the versions may or may not be in order.", file=sys.stderr)
    sys.exit(2)


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no end after {TIMEOUT} s: {' '.join(map(str, command))}")


def audit() -> int:
    with tempfile.TemporaryDirectory(prefix="custody-audit-") as home:
        venv.create(home, with_pip=True)
        python, report = Path(home) / "bin/python", Path(home) / "report.json"
        installed = run(python, "-m", "pip", "install", "--quiet", PIP_AUDIT)
        if installed.returncode:
            could_not(f"INSTALL {PIP_AUDIT}", installed.stderr)
        audited = run(
            python, "-m", "pip_audit", "--requirement", PINS, "--no-deps", "--disable-pip", "--progress-spinner", "off",
            "--format", "json", "--output", report,
        )  # fmt: skip
        # without a report it has not looked; its exit status is 1 in that case, too
        if not report.exists() or not (found := json.loads(report.read_text(encoding="utf-8"))["dependencies"]):
            could_not("AUDIT", audited.stderr)
    return show(found)


def show(found: list[dict[str, Any]]) -> int:
    """The vulnerabilities of a report."""
    seen = {one["name"]: one for one in found if "skip_reason" not in one}
    flawed = [(one, flaw) for one in seen.values() for flaw in one["vulns"]]
    for one, flaw in flawed:
        fixed = ", ".join(flaw["fix_versions"]) or "no version"
        print(f"{one['name']} {one['version']}: {flaw['id']}, fixed in {fixed}")
    print(f"{len(seen)} of {len(pins())} pinned versions were looked up, {len(flawed)} known vulnerabilities")
    if unseen := pins().keys() - seen.keys():
        reasons = {one.get("skip_reason", "") for one in found} - {""}
        could_not(f"LOOK UP {len(unseen)} OF {len(pins())} PINS", "\n".join(sorted(reasons)[:3]))
    return 1 if flawed else 0


def outdated() -> int:
    reachable = run(sys.executable, "-m", "pip", "index", "versions", "pip")
    if reachable.returncode:
        could_not("ASK FOR NEWER RELEASES", reachable.stderr)
    listed = run(sys.executable, "-m", "pip", "list", "--outdated", "--format", "json", "--disable-pip-version-check")
    # pip goes on without the answers that it does not get, and says so only here
    failed = [line for line in listed.stderr.splitlines() if line.startswith(("WARNING: Retrying", "ERROR"))]
    if listed.returncode or failed:
        could_not("ASK FOR NEWER RELEASES", "\n".join(failed) or listed.stderr)
    newer = {one["name"].lower().replace("_", "-"): one["latest_version"] for one in json.loads(listed.stdout)}
    old = {name: (version, newer[name]) for name, version in pins().items() if name in newer}
    for name, (version, latest) in old.items():
        print(f"{name} {version} → {latest}")
    print(f"{len(old)} of {len(pins())} pinned versions have a newer release")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["audit", "outdated"])
    return {"audit": audit, "outdated": outdated}[parser.parse_args().what]()


if __name__ == "__main__":
    sys.exit(main())
