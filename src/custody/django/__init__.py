"""Custody in a Django project: `INSTALLED_APPS += ["custody.django"]`. See docs/django.md.

`client()` is the Custody of this process. `publish_on_commit` publishes after the commit of the transaction,
`write_event` writes to the outbox in the transaction.
"""

from __future__ import annotations

from custody import extras

with extras.named():
    import django as _django  # noqa: F401  # names the extra that is missing, before anything else imports Django

from custody.django.client import client, close
from custody.django.on_commit import publish_on_commit, write_event

__all__ = ["client", "close", "publish_on_commit", "write_event"]
