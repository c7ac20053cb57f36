"""`ApiKeys` of engine/apikeys.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from collections.abc import Collection

from custody.aio.base import Base
from custody.bridge import run
from custody.model.policy import Duration
from custody.verbs.apikeys import ApiKey, NewKey


class ApiKeys(Base):
    """Keys for callers of a server. Calls in this process need no key."""

    async def create_api_key(
        self,
        name: str,
        *,
        produce: Collection[str] = (),
        consume: Collection[str] = (),
        admin: Collection[str] = (),
        expires: Duration | None = None,
    ) -> NewKey:
        """Creates a key. Each right is a list of patterns of topics (`orders`, `orders-*`, `*`); `admin` includes the
        other two.

        The secret is returned only here: the database stores a digest of it.
        """
        return await run(
            lambda: self._of.create_api_key(name, produce=produce, consume=consume, admin=admin, expires=expires)
        )

    async def api_keys(self, *, revoked: bool = False) -> list[ApiKey]:
        """The keys, newest last; with `revoked` also the revoked ones."""
        return await run(lambda: self._of.api_keys(revoked=revoked))

    async def revoke_api_key(self, name: str) -> bool:
        """Revokes a key; servers notice within seconds. False if it was already revoked."""
        return await run(lambda: self._of.revoke_api_key(name))
