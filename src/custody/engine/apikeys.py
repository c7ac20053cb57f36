"""API keys: who may call a server."""

from __future__ import annotations

from collections.abc import Collection

from custody import apikeys
from custody.apikeys import ApiKey, NewKey
from custody.engine.base import Base
from custody.policy import Duration


class ApiKeys(Base):
    """Keys for the HTTP door; calls in this process need none."""

    def create_api_key(
        self,
        name: str,
        *,
        produce: Collection[str] = (),
        consume: Collection[str] = (),
        admin: Collection[str] = (),
        expires: Duration | None = None,
    ) -> NewKey:
        """A key with rights on the topics that these patterns match (`orders`, `orders-*`, `*`). Admin includes both.

        Its secret is returned here and nowhere else: the database has only a digest of it.
        """
        return apikeys.create(
            self._db,
            name,
            produce=produce,
            consume=consume,
            admin=admin,
            expires=expires,
            actor=self.worker,
            now=self._now(),
        )

    def api_keys(self, *, revoked: bool = False) -> list[ApiKey]:
        """The keys, the newest last; with `revoked` those too that are no more."""
        return apikeys.every(self._db, revoked=revoked, now=self._now())

    def revoke_api_key(self, name: str) -> bool:
        """The key opens nothing any more; servers notice within seconds. False if it was revoked before."""
        return apikeys.revoke(self._db, name, actor=self.worker, now=self._now())
