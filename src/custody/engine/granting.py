"""Rights of roles of the database, for those that are not the owner of the schema."""

from __future__ import annotations

from custody.engine.base import Base
from custody.errors import InvalidArgument
from custody.store import grants
from custody.store.roles import ROLES, Role


class Granting(Base):
    """Needs a connection of the owner of the schema, or of a superuser."""

    def grants(self, role: Role, *, to: str, apply: bool = True) -> list[str]:
        """Gives a role of the database the rights that this role of Custody needs, and takes what it has beyond them.

        Returns the statements; `apply=False` only returns them. A migration gives the rights of its release again.
        """
        if role not in ROLES:
            raise InvalidArgument(f"{role!r} is no role of Custody", f"Choose one of: {', '.join(ROLES)}.")
        with self._db.transaction() as connection:
            return grants.give(connection, role, to, apply=apply)

    def revoke_grants(self, *, to: str, apply: bool = True) -> list[str]:
        """Takes all rights on Custody's schema from a role of the database. Returns the statements."""
        with self._db.transaction() as connection:
            return grants.give(connection, None, to, apply=apply)
