"""API keys: who may call a server."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from custody.engine.base import Base
from custody.errors import InvalidArgument
from custody.model.policy import interval, seconds
from custody.verbs.apikeys import ApiKey, NewKey, digest_of, key_of, new_secret, patterns
from custody.wire.fields import GivenTimeout, Help

KeyName = Annotated[str, Help("Name of the key, such as its user.")]


class ApiKeys(Base):
    """Keys for callers of a server. Calls in this process need no key."""

    def create_api_key(
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

    def api_keys(self, *, revoked: Annotated[bool, Help("Include revoked keys.")] = False) -> list[ApiKey]:
        """The keys and their rights, without secrets, newest last."""
        return [key_of(row) for row in self._rows("list_api_keys", revoked=revoked)]

    def revoke_api_key(self, name: KeyName) -> bool:
        """Revokes a key. Servers refuse it within 5 seconds.

        False if it was already revoked.
        """
        return bool(self._value("revoke_api_key", name=name))
