"""API keys: who may call a server."""

from __future__ import annotations

from collections.abc import Collection

from custody.engine.base import Base
from custody.errors import InvalidArgument
from custody.model.policy import Duration, interval, seconds
from custody.verbs.apikeys import ApiKey, NewKey, digest_of, key_of, new_secret, patterns


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
        if expires is not None and seconds(expires) < 1:
            raise InvalidArgument(f"a key cannot expire after {expires!r}", "Give it a second at least, or no end.")
        key_id, secret = new_secret()
        row = self._rows(
            "create_api_key",
            key_id=key_id,
            name=name,
            digest=digest_of(secret.encode()),
            produce=patterns(produce),
            consume=patterns(consume),
            admin=patterns(admin),
            expires_in=interval(expires),
        )[0]
        return NewKey(key=key_of({**row, "active": True}), secret=secret)

    def api_keys(self, *, revoked: bool = False) -> list[ApiKey]:
        """The keys, the newest last; with `revoked` those too that are no more."""
        return [key_of(row) for row in self._rows("list_api_keys", revoked=revoked)]

    def revoke_api_key(self, name: str) -> bool:
        """The key opens nothing any more; servers notice within seconds. False if it was revoked before."""
        return bool(self._value("revoke_api_key", name=name))
