"""What the admin pages have in common: they only show, on Custody's database, and count no more than they show."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.utils import quote
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied, ValidationError
from django.core.paginator import Paginator
from django.db import connections
from django.http import HttpResponseRedirect
from django.urls import reverse

from custody.django.checks import MIGRATE
from custody.django.configuration import configuration
from custody.django.models import Group
from custody.errors import InvalidConfig

MOST = 1000
"""Most rows that a list shows and counts."""


def custodys_alias() -> str | None:
    """The alias of Custody's database; None if Django has no connection to it."""
    try:
        return configuration().alias
    except InvalidConfig:
        return None  # the system check custody.E001 says so


class BoundedPaginator(Paginator):
    """Pages of the first rows only: their number is exact up to `MOST`, whatever the table has."""

    @cached_property
    def count(self) -> int:
        return min(MOST, self._up_to_one_more)

    @property
    def more(self) -> bool:
        return bool(self._up_to_one_more > MOST)

    @cached_property
    def _up_to_one_more(self) -> int:
        return int(self.object_list.order_by()[: MOST + 1].count())


class GroupFilter(admin.SimpleListFilter):
    """One group of a topic."""

    title = "group"
    parameter_name = "group"

    def lookups(self, request: Any, model_admin: Any) -> Iterable[tuple[str, str]]:
        groups = Group.objects.using(model_admin.alias).order_by("topic__name", "name")
        names = (f"{topic}/{group}" for topic, group in groups.values_list("topic__name", "name")[:MOST])
        return [(name, name) for name in names]

    def queryset(self, request: Any, queryset: Any) -> Any:
        if self.value() is None:
            return queryset
        topic, _, group = self.value().partition("/")
        return queryset.filter(topic=topic, consumer_group=group)


class _List(ChangeList):
    def url_for_result(self, result: Any) -> str:
        identity = [str(value) for value in self.model_admin.identity_of(result).values()]
        page = f"admin:{self.opts.app_label}_{self.opts.model_name}_change"
        place = reverse(page, args=(quote(json.dumps(identity)),), current_app=self.model_admin.admin_site.name)
        return str(place)

    def get_results(self, request: Any) -> None:
        super().get_results(request)
        if self.paginator.more:
            messages.info(request, f"These are the first {MOST:,}; there are more. Choose a group, or search.")


class ReadOnlyAdmin(admin.ModelAdmin):
    """A page without any right to add, change or delete. Whoever has the right to view may see it."""

    IDENTITY: ClassVar[tuple[str, ...]]
    """The fields that identify a row."""
    actions = None
    paginator = BoundedPaginator
    show_full_result_count = False
    list_max_show_all = 200
    list_per_page = 50

    @property
    def alias(self) -> str | None:
        return custodys_alias()

    def identity_of(self, row: Any) -> dict[str, Any]:
        return {name: getattr(row, name) for name in self.IDENTITY}

    def get_queryset(self, request: Any) -> Any:
        return super().get_queryset(request).using(self.alias)

    def get_object(self, request: Any, object_id: str, from_field: str | None = None) -> Any:
        try:
            values = json.loads(object_id)
            wanted = dict(zip(self.IDENTITY, map(str, values), strict=True))
            wanted = {name: self.model._meta.get_field(name).to_python(value) for name, value in wanted.items()}
        except (ValueError, TypeError, ValidationError):
            return None
        return self.get_queryset(request).filter(**wanted).first()

    def get_changelist(self, request: Any, **_given: Any) -> type[ChangeList]:
        return _List

    def get_readonly_fields(self, request: Any, obj: Any = None) -> Any:
        return self.fields

    def changelist_view(self, request: Any, extra_context: Any = None) -> Any:
        return self._without_schema(request) or super().changelist_view(request, extra_context)

    def changeform_view(
        self, request: Any, object_id: str | None = None, form_url: str = "", extra_context: Any = None
    ) -> Any:
        return self._without_schema(request) or super().changeform_view(request, object_id, form_url, extra_context)

    def _without_schema(self, request: Any) -> HttpResponseRedirect | None:
        """Where to go instead if there is nothing to show: the index, with a message."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        with connections[self.alias].cursor() as cursor:
            cursor.execute("SELECT to_regclass('custody.group_state') IS NOT NULL")
            if cursor.fetchone() == (True,):
                return None
        messages.warning(request, f"The schema of Custody is missing, or older. {MIGRATE}")
        return HttpResponseRedirect(reverse("admin:index", current_app=self.admin_site.name))

    def has_module_permission(self, request: Any) -> bool:
        return self.alias is not None and bool(super().has_module_permission(request))

    def has_view_permission(self, request: Any, obj: Any = None) -> bool:
        return self.alias is not None and bool(super().has_view_permission(request, obj))

    def has_add_permission(self, request: Any) -> bool:
        return False

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: Any, obj: Any = None) -> bool:
        return False
