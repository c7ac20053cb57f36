"""Models over the views of Custody, for the admin pages. Django neither creates nor changes any of them.

No view has a column that identifies a row, but a model needs a primary key: the one declared here is only a part of
what identifies a row (`IDENTITY` of its admin page).
"""

from __future__ import annotations

from django.db import models


class _OfCustody(models.Model):
    class Meta:
        abstract = True
        managed = False
        default_permissions: tuple[str, ...] = ("view",)


class DeadLetter(_OfCustody):
    """A dead message without its content: for a list that joins nothing with the log."""

    topic = models.CharField(max_length=200)
    consumer_group = models.CharField("group", max_length=200)
    partition = models.IntegerField()
    offset = models.BigIntegerField(primary_key=True, db_column="event_offset")
    key = models.TextField(null=True)
    status = models.TextField()
    attempts = models.IntegerField()
    last_error = models.TextField(null=True)
    died_at = models.DateTimeField("died", db_column="updated_at")

    class Meta(_OfCustody.Meta):
        db_table = '"custody"."deliveries"'
        verbose_name = "dead letter"

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset} in {self.consumer_group}"


class DeadLetterContent(_OfCustody):
    """What a dead letter is made of, for the page of one."""

    topic = models.CharField(max_length=200)
    consumer_group = models.CharField(max_length=200)
    partition = models.IntegerField()
    offset = models.BigIntegerField(primary_key=True)
    payload = models.TextField()
    payload_kind = models.TextField()
    headers = models.JSONField(null=True)
    published_at = models.DateTimeField()
    reason = models.TextField()
    last_traceback = models.TextField(null=True)
    first_failure = models.DateTimeField(null=True)
    held = models.BooleanField()

    class Meta(_OfCustody.Meta):
        db_table = '"custody"."dead_letters"'
        default_permissions = ()


class GroupFigures(_OfCustody):
    """The figures of a group, over all its partitions."""

    topic = models.CharField(max_length=200)
    consumer_group = models.CharField("group", max_length=200, primary_key=True)
    lag = models.BigIntegerField()
    waiting = models.BigIntegerField()
    in_flight = models.BigIntegerField()
    parked = models.BigIntegerField()
    dead = models.BigIntegerField()
    depth = models.BigIntegerField()
    oldest_unresolved_age = models.FloatField(null=True)
    paused = models.BooleanField()
    breaker = models.TextField(null=True)

    class Meta(_OfCustody.Meta):
        db_table = '"custody"."group_state"'
        verbose_name = "group"

    def __str__(self) -> str:
        return f"{self.topic}/{self.consumer_group}"


class InFlight(_OfCustody):
    """A part of a live lease: messages that a worker has."""

    topic = models.CharField(max_length=200)
    consumer_group = models.CharField("group", max_length=200)
    partition = models.IntegerField()
    lease_id = models.UUIDField(primary_key=True)
    offsets = models.TextField()
    messages = models.BigIntegerField()
    attempt = models.IntegerField(null=True)
    worker = models.TextField(null=True)
    claimed_at = models.DateTimeField("claimed")
    deadline = models.DateTimeField()

    class Meta(_OfCustody.Meta):
        db_table = '"custody"."in_flight"'
        verbose_name = "lease in flight"
        verbose_name_plural = "leases in flight"

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition} in {self.consumer_group}, by {self.worker}"


class BlockedKey(_OfCustody):
    """A key that cannot go on, and what it waits for."""

    topic = models.CharField(max_length=200)
    consumer_group = models.CharField("group", max_length=200)
    partition = models.IntegerField()
    key = models.TextField(primary_key=True)
    blocked_by = models.BigIntegerField(null=True)
    why = models.TextField()
    attempts = models.IntegerField(null=True)
    run_at = models.DateTimeField("next attempt", null=True)
    last_error = models.TextField(null=True)
    worker = models.TextField(null=True)
    since = models.DateTimeField()
    parked = models.BigIntegerField()

    class Meta(_OfCustody.Meta):
        db_table = '"custody"."blocked_keys"'
        verbose_name = "blocked key"

    def __str__(self) -> str:
        return f"{self.key} in {self.consumer_group}"


class Topic(_OfCustody):
    topic_id = models.IntegerField(primary_key=True)
    name = models.TextField()

    class Meta(_OfCustody.Meta):
        db_table = '"custody"."topics"'
        default_permissions = ()


class Group(_OfCustody):
    """The names of groups, for filters."""

    group_id = models.IntegerField(primary_key=True)
    topic = models.ForeignKey(Topic, on_delete=models.DO_NOTHING)
    name = models.TextField()

    class Meta(_OfCustody.Meta):
        db_table = '"custody"."groups"'
        default_permissions = ()
