"""API keys: who may call a server."""

from __future__ import annotations

from collections.abc import Collection

from custody.engine.base import Base
from custody.errors import InvalidArgument
from custody.model.policy import Duration, interval, seconds
from custody.verbs.apikeys import ApiKey, NewKey, digest_of, key_of, new_secret, patterns


class ApiKeys(Base):
    """Keys for callers of a server. Calls in this process need no key."""

    def create_api_key(
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
        if expires is not None and seconds(expires) < 1:
            raise InvalidArgument(
                f"a key cannot expire after {expires!r}", "Give at least one second, or leave expires out."
            )
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
        """The keys, newest last; with `revoked` also the revoked ones."""
        return [key_of(row) for row in self._rows("list_api_keys", revoked=revoked)]

    def revoke_api_key(self, name: str) -> bool:
        """Revokes a key; servers notice within seconds. False if it was already revoked."""
        return bool(self._value("revoke_api_key", name=name))
