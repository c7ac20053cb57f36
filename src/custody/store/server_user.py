"""The user of the embedded server, and its access to files and directories.

PostgreSQL refuses to run as root. A root process therefore runs it as an existing unprivileged user, and everything
that the server uses has to belong to that user or be accessible to it. Any other process runs it as its own user.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from custody.errors import EmbeddedError

logger = logging.getLogger(__name__)

CANDIDATES = ("custody", "postgres", "nobody")


@dataclass(frozen=True, kw_only=True)
class ServerUser:
    """The account of the server's processes; `switched`: it is not the account of this process."""

    name: str
    uid: int
    gid: int
    switched: bool

    def spawn_options(self) -> dict[str, Any]:
        """The arguments of `subprocess` that start a process as this user and with none of root's groups."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []} if self.switched else {}


def choose(data_dir: Path) -> ServerUser:
    """The owner of an existing data directory, else this process's user or, for root, the first known candidate."""
    try:
        owner: os.stat_result | None = data_dir.stat()
    except FileNotFoundError:
        owner = None
    if os.geteuid() != 0:
        if owner is not None and owner.st_uid != os.geteuid():
            raise EmbeddedError(
                f"{data_dir} belongs to user {_name(owner.st_uid)}, and this process runs as {_name(os.geteuid())}. "
                f"Run it as {_name(owner.st_uid)} or choose another home (CUSTODY_HOME)."
            )
        return ServerUser(name=_name(os.geteuid()), uid=os.geteuid(), gid=os.getegid(), switched=False)
    if owner is not None:
        if owner.st_uid == 0:
            raise EmbeddedError(
                f"{data_dir} belongs to root, and PostgreSQL does not run as root. "
                f"Give it to an unprivileged user, for example: chown -R nobody '{data_dir}'."
            )
        with contextlib.suppress(KeyError):
            known = pwd.getpwuid(owner.st_uid)
            return ServerUser(name=known.pw_name, uid=known.pw_uid, gid=known.pw_gid, switched=True)
        return ServerUser(name=_name(owner.st_uid), uid=owner.st_uid, gid=owner.st_gid, switched=True)
    for candidate in CANDIDATES:
        with contextlib.suppress(KeyError):
            known = pwd.getpwnam(candidate)
            return ServerUser(name=known.pw_name, uid=known.pw_uid, gid=known.pw_gid, switched=True)
    raise EmbeddedError(
        f"PostgreSQL does not run as root and none of the users {', '.join(CANDIDATES)} exists. "
        "Create one (useradd --system custody), run as an ordinary user, or give a postgresql:// URL."
    )


def make_searchable(directory: Path, user: ServerUser) -> None:
    """Let `user` pass through `directory` and its parents.

    Adds the search bit alone, so that nothing becomes listable or readable, only where it is missing, and warns about
    each directory that it changes. Does nothing when the server runs as this process's own user.
    """
    if not user.switched:
        return
    for each in reversed((directory, *directory.parents)):
        info = each.stat()
        if info.st_uid == user.uid:
            search = stat.S_IXUSR
        elif info.st_gid == user.gid:
            search = stat.S_IXGRP
        else:
            search = stat.S_IXOTH
        if info.st_mode & search:
            continue
        try:
            each.chmod(stat.S_IMODE(info.st_mode) | search)
        except OSError as error:
            raise EmbeddedError(
                f"The server's user {user.name} cannot enter {each} and the search bit could not be added ({error}). "
                "Choose a home that it can reach (CUSTODY_HOME), or give a postgresql:// URL."
            ) from error
        logger.warning("Added the search bit to %s so that the server's user %s can pass through it", each, user.name)


def private_directory(directory: Path, user: ServerUser) -> None:
    """Make sure that `directory` is a real directory of mode 0700 that belongs to the server's user.

    Refuses one that somebody else has put there. Looks and changes through one descriptor, so that the directory
    cannot be swapped in between.
    """
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise EmbeddedError(f"{directory} is not a directory of {user.name} ({error}). Remove it and retry.") from error
    try:
        info = os.fstat(descriptor)
        if info.st_uid not in (user.uid, os.geteuid()):
            raise EmbeddedError(
                f"{directory} belongs to {_name(info.st_uid)} instead of {user.name}, so what is in it cannot be "
                "trusted. Remove it, or choose another home (CUSTODY_HOME)."
            )
        if info.st_uid != user.uid:
            os.fchown(descriptor, user.uid, user.gid)
        if stat.S_IMODE(info.st_mode) != 0o700:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def open_private(file: Path, user: ServerUser, flags: int = 0) -> int:
    """Open `file` for reading and writing, made with mode 0600 for the server's user if it is not there.

    Never follows a symbolic link and never changes the owner of a file it has not made: a root process opens these
    files in a directory that an unprivileged user can write to. The descriptor is closed on exec.
    """
    flags |= os.O_RDWR | os.O_NOFOLLOW
    try:
        return os.open(file, flags)
    except FileNotFoundError:
        pass
    try:
        descriptor = os.open(file, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return os.open(file, flags)
    if user.switched:
        os.fchown(descriptor, user.uid, user.gid)
    return descriptor


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
