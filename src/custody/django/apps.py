"""The app, for INSTALLED_APPS: system checks, and fresh connections for handlers."""

from __future__ import annotations

from django.apps import AppConfig
from django.core import checks

from custody.django.checks import check_configuration, check_schema
from custody.django.fresh_connections import with_fresh_connections
from custody.handlers import wrap_each


class CustodyConfig(AppConfig):
    """Custody, as an app of Django."""

    name = "custody.django"
    label = "custody"
    verbose_name = "Custody"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        checks.register(check_configuration)
        checks.register(check_schema, checks.Tags.database)
        wrap_each(with_fresh_connections)
