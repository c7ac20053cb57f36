"""`ApiKeys` of engine/apikeys.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from custody.aio.base import Base
from custody.bridge import run
from custody.engine.apikeys import KeyName
from custody.verbs.apikeys import ApiKey, NewKey
from custody.wire.fields import GivenTimeout, Help


class ApiKeys(Base):
    """Keys for callers of a server. Calls in this process need no key."""

    async def create_api_key(
        self,
        name: KeyName,
        *,
        produce: Annotated[
            Collection[str], Help("Topics that the key may publish to: orders, orders-*, *.", "PATTERN")
        ] = (),
        consume: Annotated[Collection[str], Help("Topics that the key may read and receive from.", "PATTERN")] = (),
        admin: Annotated[Collection[str], Help("Topics that the key may do anything with.", "PATTERN")] = (),
        expires: Annotated[GivenTimeout | None, Help("Lifetime of the key, such as 90d.")] = None,
    ) -> NewKey:
        """Creates a key. Each right is a list of patterns of topics (`orders`, `orders-*`, `*`); `admin` includes the
        other two.

        The secret is returned only here: the database stores a digest of it.
        """
        return await run(
            lambda: self._of.create_api_key(name, produce=produce, consume=consume, admin=admin, expires=expires)
        )

    async def api_keys(self, *, revoked: Annotated[bool, Help("Include revoked keys.")] = False) -> list[ApiKey]:
        """The keys and their rights, without secrets, newest last."""
        return await run(lambda: self._of.api_keys(revoked=revoked))

    async def revoke_api_key(self, name: KeyName) -> bool:
        """Revokes a key. Servers refuse it within 5 seconds.

        False if it was already revoked.
        """
        return await run(lambda: self._of.revoke_api_key(name))
