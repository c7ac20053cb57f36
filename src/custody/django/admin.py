"""Admin pages, which only show: dead letters, groups, leases in flight, blocked keys."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.db.models.functions import Left
from django.urls import reverse
from django.utils.formats import localize
from django.utils.html import format_html
from django.utils.timezone import localtime

from custody.django.models import BlockedKey, DeadLetter, DeadLetterContent, GroupFigures, InFlight
from custody.django.read_only import GroupFilter, ReadOnlyAdmin

SHOWN = 20_000
"""Most characters of a payload on a page."""


@admin.register(DeadLetter)
class DeadLetterAdmin(ReadOnlyAdmin):
    IDENTITY = ("topic", "consumer_group", "partition", "offset")
    list_display = ("__str__", "key", "attempts", "last_error", "died_at")
    list_filter = (GroupFilter,)
    search_fields = ("=key", "last_error")
    ordering = ("-died_at", "topic", "consumer_group", "partition")
    fields = (
        *IDENTITY,
        *("key", "attempts", "reason", "held", "last_error", "traceback"),
        *("published_at", "first_failure", "died_at", "headers", "payload_kind", "payload"),
    )

    def get_queryset(self, request: Any) -> Any:
        return super().get_queryset(request).filter(status="dead")

    def get_object(self, request: Any, object_id: str, from_field: str | None = None) -> Any:
        found = super().get_object(request, object_id, from_field)
        if found is None:
            return None
        contents = DeadLetterContent.objects.using(self.alias).defer("payload").annotate(start=Left("payload", SHOWN))
        found.content = contents.filter(**self.identity_of(found)).first()
        return found if found.content is not None else None

    def reason(self, letter: Any) -> Any:
        return letter.content.reason

    @admin.display(boolean=True)
    def held(self, letter: Any) -> Any:
        return letter.content.held

    @admin.display(description="published")
    def published_at(self, letter: Any) -> Any:
        return _moment(letter.content.published_at)

    def first_failure(self, letter: Any) -> Any:
        return _moment(letter.content.first_failure)

    def headers(self, letter: Any) -> Any:
        return _lines("\n".join(f"{name}: {value}" for name, value in (letter.content.headers or {}).items()))

    def payload_kind(self, letter: Any) -> Any:
        return letter.content.payload_kind

    def payload(self, letter: Any) -> Any:
        text = letter.content.start
        return _lines(text if len(text) < SHOWN else f"{text}\n… (the first {SHOWN:,} characters)")

    def traceback(self, letter: Any) -> Any:
        return _lines(letter.content.last_traceback)


def _lines(text: str | None) -> Any:
    """Text with its line breaks, escaped."""
    return format_html("<pre>{}</pre>", text) if text else "-"


def _moment(at: datetime | None) -> str:
    return "-" if at is None else str(localize(localtime(at)))


@admin.register(GroupFigures)
class GroupFiguresAdmin(ReadOnlyAdmin):
    IDENTITY = ("topic", "consumer_group")
    list_display = ("__str__", "lag", "waiting", "in_flight", "parked", "dead_letters", "depth", "oldest", "paused",
                    "breaker")  # fmt: skip
    list_filter = (GroupFilter,)
    ordering = ("topic", "consumer_group")
    fields = ("topic", *list_display[1:])

    @admin.display(description="dead", ordering="dead")
    def dead_letters(self, group: Any) -> Any:
        if not group.dead:
            return 0
        place = reverse(f"{self.admin_site.name}:custody_deadletter_changelist")
        of_group = urlencode({GroupFilter.parameter_name: f"{group.topic}/{group.consumer_group}"})
        return format_html('<a href="{}?{}">{}</a>', place, of_group, group.dead)

    @admin.display(description="oldest unresolved (s)", ordering="oldest_unresolved_age")
    def oldest(self, group: Any) -> Any:
        return None if group.oldest_unresolved_age is None else round(group.oldest_unresolved_age)


@admin.register(InFlight)
class InFlightAdmin(ReadOnlyAdmin):
    IDENTITY = ("lease_id", "partition")
    list_display = ("__str__", "messages", "attempt", "claimed_at", "deadline")
    list_filter = (GroupFilter,)
    search_fields = ("worker",)
    ordering = ("deadline",)
    fields = ("topic", "consumer_group", "partition", "lease_id", "offsets", "messages", "attempt", "worker",
              "claimed_at", "deadline")  # fmt: skip


@admin.register(BlockedKey)
class BlockedKeyAdmin(ReadOnlyAdmin):
    IDENTITY = ("topic", "consumer_group", "partition", "key")
    list_display = ("__str__", "why", "blocked_by", "parked", "attempts", "run_at", "since")
    list_filter = (GroupFilter,)
    search_fields = ("=key",)
    ordering = ("since",)
    fields = ("topic", "consumer_group", "partition", "key", "why", "blocked_by", "attempts", "run_at", "last_error",
              "worker", "since", "parked")  # fmt: skip
