"""The embedded server under everything that happens to processes: joins, last exits, kills, forks, odd paths, root."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pwd
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, LiteralString

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from tests.databases import in_memory

from custody.errors import ExtraMissing
from custody.store import cluster, embedded, server_user
from custody.store.embedded import EmbeddedError, acquire
from custody.store.postmaster import LOG_LIMIT, Home

SOURCE = Path(embedded.__file__).resolve().parents[2]
AS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not AS_ROOT, reason="only root runs the server as another user")

USER_PROGRAM = """
import sys
from pathlib import Path
from custody.store.embedded import acquire
server = acquire(Path(sys.argv[1]))
print(server.url, flush=True)
sys.stdin.readline()
"""


def wait_until(condition: Callable[[], object], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"Timed out after {seconds} s waiting until {what}")
        time.sleep(0.005)


def server_processes(home: Path) -> list[int]:
    """The processes, not zombies, that work in the home's data directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "cwd").readlink() == home.resolve() / "data":
                    found.append(int(entry.name))
    return found


class Users:
    """Processes that each hold one claim on a home until told to exit."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def begin(self, home: Path, *, python: str = sys.executable, **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path])}
        process = subprocess.Popen(
            [python, "-c", USER_PROGRAM, str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env=environment,
            **options,
        )
        self.processes.append(process)
        return process

    def start(self, home: Path, **options: Any) -> subprocess.Popen[str]:
        process = self.begin(home, **options)
        self.url(process)
        return process

    @staticmethod
    def url(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("postgresql://"), f"the user process ended with {process.wait()}"
        return url

    @staticmethod
    def finish(process: subprocess.Popen[str]) -> None:
        process.communicate("exit\n", timeout=30)
        assert process.returncode == 0

    @staticmethod
    def kill(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate(timeout=30)


@pytest.fixture
def users() -> Iterator[Users]:
    users = Users()
    yield users
    for process in users.processes:
        if process.poll() is None:
            users.kill(process)


@pytest.fixture
def new_home(base: Path) -> Path:
    """A home that has yet to be made."""
    return base / "home"


@pytest.fixture(scope="module")
def made_home() -> Iterator[Path]:
    with in_memory("embedded-") as directory:
        acquire(directory / "home").close()
        yield directory / "home"


@pytest.fixture
def home(made_home: Path) -> Iterator[Path]:
    """A home whose server does not run; shared by the tests, because making a data directory takes the most time."""
    yield made_home
    embedded.stop(made_home, "immediate")


def query(url: str, statement: LiteralString) -> object:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement)
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def test_starts_with_the_first_user_and_stops_with_the_last(new_home: Path, users: Users) -> None:
    """Where a first attempt was interrupted, too."""
    leftover = new_home / "data.new-interrupted"
    leftover.mkdir(parents=True)
    (leftover / "PG_VERSION").write_text("18\n")
    with acquire(new_home) as first:
        assert not list(new_home.glob("data.new-*"))
        assert (first.home, first.data_dir) == (new_home, new_home / "data")
        assert (first.bin_dir / "psql").is_file()
        assert query(first.url, "SELECT current_database()") == "custody"
        other = users.start(new_home)
        with acquire(new_home) as again:
            assert again.url == first.url
        assert query(first.url, "SELECT 1") == 1
    assert server_processes(new_home), "the other process still uses the server"
    users.finish(other)
    assert not server_processes(new_home), "the exit of the last user waits for the server's end"
    assert not (new_home / "data" / "postmaster.pid").exists()


def test_settings_are_durable_and_local_by_default_and_can_be_overridden(home: Path) -> None:
    with acquire(home, settings={"work_mem": "7MB", "application_name": "it's a \\ test"}) as server:
        assert query(server.url, "SHOW fsync") == "on"
        assert query(server.url, "SHOW listen_addresses") == ""
        assert query(server.url, "SHOW timezone") == "UTC"
        assert query(server.url, "SHOW work_mem") == "7MB"
        assert query(server.url, "SELECT reset_val FROM pg_settings WHERE name = 'max_connections'") == "200"
        assert query(server.url, "SELECT datlocale FROM pg_database WHERE datname = 'custody'") == "C.UTF-8"


def test_closing_twice_gives_back_one_claim(home: Path) -> None:
    first, second = acquire(home), acquire(home)
    first.close()
    first.close()
    assert query(second.url, "SELECT 1") == 1
    second.close()
    assert not server_processes(home)


def test_threads_share_one_server(home: Path) -> None:
    servers: list[embedded.EmbeddedServer] = []
    threads = [threading.Thread(target=lambda: servers.append(acquire(home))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({server.url for server in servers}) == 1
    for server in servers[1:]:
        server.close()
    assert query(servers[0].url, "SELECT 1") == 1
    servers[0].close()
    assert not server_processes(home)


def test_processes_that_meet_on_a_new_home_share_one_server(new_home: Path, users: Users) -> None:
    together = [users.begin(new_home) for _ in range(3)]
    assert len({users.url(process) for process in together}) == 1
    for process in together:
        users.finish(process)
    assert not server_processes(new_home)


@pytest.mark.chaos
def test_a_killed_user_stops_nobody_and_leaks_nothing(home: Path, users: Users) -> None:
    starter, other = users.start(home), users.start(home)
    users.kill(starter)
    with acquire(home) as server:
        users.kill(other)
        assert query(server.url, "SELECT 1") == 1
    assert not server_processes(home)


@pytest.mark.chaos
def test_a_server_whose_users_were_all_killed_is_joined_again(home: Path, users: Users) -> None:
    users.kill(users.start(home))
    survivors = server_processes(home)
    assert survivors
    with acquire(home) as server:
        assert server.pid in survivors
    assert not server_processes(home)


@pytest.mark.chaos
def test_a_killed_postmaster_is_recovered_with_its_data(home: Path, users: Users) -> None:
    starter = users.start(home)
    with acquire(home) as server:
        query(server.url, "CREATE TABLE kept AS SELECT 42 AS n")
        killed = server.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        with acquire(home) as recovered:
            assert recovered.pid != killed
            assert query(recovered.url, "SELECT n FROM kept") == 42
        assert query(server.url, "SELECT n FROM kept") == 42
    users.finish(starter)
    assert not server_processes(home)


def test_a_process_id_file_that_names_a_stranger_is_stale(home: Path) -> None:
    acquire(home).close()
    pid_file = home / "data" / "postmaster.pid"
    stale = (str(os.getpid()), str(home / "data"), "1", "5432", str(home / "run"), "", "1 1", "ready")
    pid_file.write_text("\n".join(stale) + "\n")
    with acquire(home) as server:
        assert server.pid != os.getpid()
        assert query(server.url, "SELECT 1") == 1


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_stopped_server_is_started_by_the_next_acquire(home: Path, mode: Literal["fast", "immediate"]) -> None:
    with acquire(home) as server:
        embedded.stop(home, mode)
        assert not server_processes(home)
        with acquire(home):
            assert query(server.url, "SELECT 1") == 1


@pytest.mark.parametrize("name", ['it\'s a "quoted" \\ $HOME, ünï', "long" * 60])
def test_odd_and_long_paths(base: Path, name: str) -> None:
    home = base / name
    with acquire(home) as server:
        assert query(server.url, "SELECT current_setting('data_directory')") == str(home / "data")
    assert not server_processes(home)
    socket_dir = Path(str(conninfo_to_dict(server.url)["host"]))
    assert len(os.fsencode(socket_dir / ".s.PGSQL.5432")) < 108
    assert socket_dir.parent == home or not socket_dir.exists(), "nothing is left in the temporary directory"


def test_a_socket_directory_planted_by_somebody_else_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = base / ("long" * 30)
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    planted = cluster._socket_dir(home, server_user.choose(home / "data"))
    planted.rmdir()
    planted.symlink_to("/tmp")
    with pytest.raises(EmbeddedError, match="Remove it"):
        acquire(home)
    if AS_ROOT:
        planted.unlink()
        planted.mkdir()
        os.chown(planted, 54321, 54321)
        with pytest.raises(EmbeddedError, match="cannot be trusted"):
            acquire(home)


def test_a_server_started_by_hand_is_joined_where_it_listens(base: Path, home: Path) -> None:
    elsewhere = base / "elsewhere"
    user = server_user.choose(home / "data")
    server_user.make_searchable(base, user)
    server_user.private_directory(elsewhere, user)
    command: list[str | Path] = [embedded.binaries() / "postgres", "-D", home / "data", "-k", elsewhere, "-h", ""]
    with subprocess.Popen(command, cwd="/", stderr=subprocess.DEVNULL, **user.spawn_options()) as by_hand:
        # the file is there before anything stands in it
        wait_until(lambda: Home.at(home).postmaster() is not None, "the server has written its process id")
        with acquire(home) as server:
            assert server.pid == by_hand.pid
            assert conninfo_to_dict(server.url)["host"] == str(elsewhere)
            assert query(server.url, "SELECT 1") == 1
        assert by_hand.wait(30) == 0, "the last user stops it"


def test_the_exit_of_a_forked_child_leaves_the_server_running(home: Path) -> None:
    with acquire(home) as server:
        child = multiprocessing.get_context("fork").Process(target=server.close)
        child.start()
        child.join()
        assert child.exitcode == 0
        exiting = os.fork()
        if exiting == 0:
            embedded._close_all()  # what atexit calls
            os._exit(0)
        assert os.waitpid(exiting, 0)[1] == 0
        assert query(server.url, "SELECT 1") == 1
    assert not server_processes(home)


def test_a_forked_child_that_lives_on_does_not_count_as_a_user(home: Path) -> None:
    server = acquire(home)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    try:
        server.close()
        assert not server_processes(home)
    finally:
        os.close(writing)
        os.waitpid(child, 0)


@pytest.mark.chaos
def test_the_interrupt_of_its_starter_does_not_reach_the_server(home: Path, users: Users) -> None:
    starter = users.start(home, start_new_session=True)
    with acquire(home) as server:
        os.killpg(starter.pid, signal.SIGINT)
        starter.communicate(timeout=30)
        assert query(server.url, "SELECT 1") == 1


def test_a_failed_start_shows_the_log_and_leaves_nothing_running(home: Path) -> None:
    with pytest.raises(EmbeddedError, match='unrecognized configuration parameter "no_such_setting"'):
        acquire(home, settings={"no_such_setting": "1"})
    assert not server_processes(home)
    acquire(home).close()


def test_a_data_directory_of_another_version_is_refused(home: Path) -> None:
    acquire(home).close()
    version = home / "data" / "PG_VERSION"
    version.write_text("15\n")
    try:
        with pytest.raises(EmbeddedError, match="made by PostgreSQL 15"):
            acquire(home)
    finally:
        version.write_text("18\n")


def test_a_missing_wheel_says_how_to_install_it(new_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("custody.extras.find_spec", lambda _: None)
    with pytest.raises(ExtraMissing, match=r"custody\[embedded\]"):
        acquire(new_home)
    assert not new_home.exists()


def test_a_big_log_is_put_aside(home: Path) -> None:
    acquire(home).close()
    with (home / "server.log").open("ab") as log:
        log.truncate(LOG_LIMIT + 1)
    acquire(home).close()
    assert (home / "server.log").stat().st_size < 100_000
    assert (home / "server.log.1").stat().st_size > LOG_LIMIT


@needs_root
def test_as_root_the_server_has_its_own_user_and_gets_only_the_search_bit(
    base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    existing = base / "existing"
    existing.mkdir(mode=0o700)
    home = existing / "made" / "home"
    with caplog.at_level(logging.WARNING), acquire(home) as server:
        assert server.pid is not None
        assert Path(f"/proc/{server.pid}").stat().st_uid == home.stat().st_uid != 0
        assert query(server.url, "SELECT 1") == 1
    assert stat.S_IMODE(base.stat().st_mode) == stat.S_IMODE(existing.stat().st_mode) == 0o701
    assert [record.getMessage().split()[5] for record in caplog.records] == [str(base), str(existing)]
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


@needs_root
def test_root_and_the_servers_user_share_a_home(base: Path, users: Users) -> None:
    nobody = pwd.getpwnam("nobody")
    as_nobody: dict[str, Any] = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    python = next(filter(lambda python: _runs(python, as_nobody), (sys.executable, "/usr/bin/python3")), None)
    if python is None:
        pytest.skip("no interpreter that user nobody may run can import psycopg and custody")
    base.chmod(0o755)
    home = base / "nobody" / "home"
    home.parent.mkdir()
    os.chown(home.parent, nobody.pw_uid, nobody.pw_gid)
    unprivileged = users.start(home, python=python, **as_nobody)
    with acquire(home) as server:
        assert server.data_dir.stat().st_uid == nobody.pw_uid
        users.finish(unprivileged)
        assert query(server.url, "SELECT 1") == 1
    assert not server_processes(home)
    with acquire(home) as server:
        assert server.pid is not None
        assert Path(f"/proc/{server.pid}").stat().st_uid == nobody.pw_uid
        users.finish(users.start(home, python=python, **as_nobody))
    assert not server_processes(home)


def _runs(python: str, options: dict[str, Any]) -> bool:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path])}
    command = [python, "-c", "import custody.store.embedded"]
    try:
        done = subprocess.run(command, cwd="/", env=environment, capture_output=True, **options)
    except OSError:
        return False
    return done.returncode == 0
