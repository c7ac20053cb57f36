"""Every error that Custody raises, each with a stable code, a message, a remedy, and an HTTP status.

CustodyError
├── Transient                     the same call may succeed later
│   ├── DatabaseUnavailable       database_unavailable
│   ├── QueueFull                 queue_full
│   ├── Withheld
│   │   ├── GroupPaused           paused
│   │   ├── BreakerOpen           breaker_open
│   │   ├── MaxInFlight           max_in_flight
│   │   ├── AckHoleCap            ack_hole_cap_exceeded
│   │   └── MaxParked             max_parked
│   ├── StageLost                 stage_lost
│   ├── PublishFailed             publish_failed
│   ├── PublisherUnavailable      publisher_unavailable
│   ├── ServerStopping            stopping
│   ├── Stalled                   stalled
│   ├── SchemaChanged             schema_changed
│   ├── RequestTimeout            request_timeout
│   └── Busy                      busy
└── Terminal                      the same call will fail again
    ├── InvalidArgument           invalid_argument
    │   ├── InvalidPolicy         invalid_policy
    │   ├── InvalidConfig         invalid_config
    │   │   ├── KeysNeeded        keys_needed
    │   │   └── InsecureKey       insecure_key
    │   ├── InvalidJson           invalid_json
    │   ├── NoPriorities          no_priorities
    │   ├── KeySplit              key_split
    │   ├── InvalidPayload        invalid_payload
    │   └── PayloadMismatch       payload_mismatch
    ├── Unauthorized              unauthorized
    ├── Forbidden                 forbidden
    ├── PermissionDenied          permission_denied
    ├── TooLarge                  too_large
    ├── UnsupportedEncoding       unsupported_encoding
    ├── MethodNotAllowed          method_not_allowed
    ├── NotFound
    │   ├── NoSuchPath            no_such_path
    │   ├── TopicNotFound         topic_not_found
    │   ├── GroupNotFound         group_not_found
    │   ├── PartitionNotFound     partition_not_found
    │   ├── ProducerNotFound      producer_not_found
    │   ├── DelayNotFound         delay_not_found
    │   ├── TransactionNotFound   transaction_not_found
    │   ├── KeyNotFound           key_not_found
    │   ├── ScheduleNotFound      schedule_not_found
    │   └── EventNotFound         event_not_found
    ├── Conflict
    │   ├── TopicExists           topic_exists
    │   ├── TopicChanged          topic_changed
    │   ├── GroupExists           group_exists
    │   ├── SettingsDiffer        settings_differ
    │   ├── ScheduleExists        schedule_exists
    │   ├── KeyExists             key_exists
    │   ├── LeaseLost             lease_lost
    │   ├── OrderConflict         order_conflict
    │   ├── KeysMoved             keys_moved
    │   ├── OffsetConflict        offset_conflict
    │   ├── SequenceConflict      sequence_conflict
    │   ├── ProducerFenced        producer_fenced
    │   ├── ProducerInUse         producer_in_use
    │   ├── TransactionOver       transaction_over
    │   ├── PipelineFenced        pipeline_fenced
    │   ├── ClaimLost             claim_lost
    │   ├── NotSkippable          not_skippable
    │   ├── OutboxRefused         outbox_refused
    │   ├── BareGroup             bare_group
    │   └── LifecycleGroup        lifecycle_group
    ├── PipelineRefused           pipeline_refused
    ├── PipelineFailed            pipeline_failed
    ├── PublishRefused            publish_refused
    ├── OffsetOutOfRange          offset_out_of_range
    ├── IsolationLevel            isolation_level
    ├── NeedsDatabase             needs_database
    ├── SchemaMismatch
    │   ├── SchemaMissing         schema_missing
    │   ├── SchemaOlder           schema_older
    │   ├── SchemaNewer           schema_newer
    │   └── SchemaInUse           schema_in_use
    ├── EmbeddedError             embedded_error
    ├── ExtraMissing              extra_missing
    └── JavaMissing               java_missing
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import ClassVar, Self


def _sentence(message: str) -> str:
    return message if message.endswith(("?", "!", ".")) else f"{message}."


class CustodyError(Exception):
    """Something went wrong in Custody."""

    code: ClassVar[str] = "custody_error"
    status: int = 500
    """The status of the HTTP answer."""
    retry_after: float | None = None
    """Seconds to wait before the next attempt, if the refusal named them."""

    def __init__(self, message: str | None = None, remedy: str = "") -> None:
        self.message = message or (type(self).__doc__ or "").strip()
        self.remedy = remedy
        self.shown = self.message
        """The message for callers of a server, without the text of a database error."""
        super().__init__(f"{_sentence(self.message)} {remedy}" if remedy else self.message)

    def showing(self, text: str) -> Self:
        """Sets the message for callers of a server."""
        self.shown = text
        return self


class Transient(CustodyError):
    """The call failed now; the same call may succeed later."""

    status = 503


class Terminal(CustodyError):
    """The same call will fail again until something is changed."""

    status = 422


class DatabaseUnavailable(Transient):
    """The database cannot be reached. Whether the last call took effect is unknown."""

    code = "database_unavailable"


class QueueFull(Transient):
    """The topic has reached its max_depth."""

    code = "queue_full"
    status = 429


class Withheld(Transient):
    """The group delivers nothing at the moment. Raised over HTTP; a claim returns an empty lease with this reason."""

    code = "withheld"


class GroupPaused(Withheld):
    """The group is paused."""

    code = "paused"


class BreakerOpen(Withheld):
    """The circuit breaker of the group is open."""

    code = "breaker_open"


class MaxInFlight(Withheld):
    """The group has reached its limit of messages in flight."""

    code = "max_in_flight"
    status = 429


class AckHoleCap(Withheld):
    """The group has too many gaps among its resolved messages."""

    code = "ack_hole_cap_exceeded"
    status = 429


class MaxParked(Withheld):
    """Too many messages wait behind blocked keys."""

    code = "max_parked"
    status = 429


class StageLost(Transient):
    """The staged messages are lost, because the database crashed. The batch has to be run again."""

    code = "stage_lost"


class ServerStopping(Transient):
    """The server is stopping."""

    code = "stopping"


class SchemaChanged(Transient):
    """The schema was migrated during the call, which changed nothing."""

    code = "schema_changed"


class Stalled(Transient):
    """A loop of this process does not turn any more."""

    code = "stalled"


class RequestTimeout(Transient):
    """The body of the request did not arrive in time."""

    code = "request_timeout"
    status = 408


class Busy(Transient):
    """Another transaction holds a lock that this call needs. Try again."""

    code = "busy"


class InvalidArgument(Terminal):
    """An argument is not valid."""

    code = "invalid_argument"

    def __init__(self, message: str | None = None, remedy: str = "", *, path: str | None = None) -> None:
        super().__init__(message, remedy)
        self.path = path
        """The path of the invalid field in a request, such as `$.messages[0].payload`."""


class InvalidPolicy(InvalidArgument):
    """The policy is not valid."""

    code = "invalid_policy"


class InvalidJson(InvalidArgument):
    """The body is not JSON."""

    code = "invalid_json"
    status = 400


class NoPriorities(InvalidArgument):
    """The topic has no priorities."""

    code = "no_priorities"


class KeySplit(InvalidArgument):
    """The given partition is not the partition of the key."""

    code = "key_split"


class InvalidConfig(InvalidArgument):
    """The configuration is not valid."""

    code = "invalid_config"


class KeysNeeded(InvalidConfig):
    """A server that other machines can reach needs API keys."""

    code = "keys_needed"


class InsecureKey(InvalidConfig):
    """An API key would be sent without TLS."""

    code = "insecure_key"


class InvalidPayload(InvalidArgument):
    """The payload cannot be stored without a change."""

    code = "invalid_payload"


class PayloadMismatch(InvalidArgument):
    """The payload of a message does not fit the type that its handler wants. A worker makes the message dead."""

    code = "payload_mismatch"


def key_too_long() -> InvalidPayload:
    """The error for a long key, found by Python or by a constraint of the database."""
    return InvalidPayload("a key has at most 2,000 bytes", "Shorten it, or take a hash of it.")


class Unauthorized(Terminal):
    """The server needs an API key."""

    code = "unauthorized"
    status = 401


class Forbidden(Terminal):
    """The API key lacks the right to do this."""

    code = "forbidden"
    status = 403


class PermissionDenied(Terminal):
    """The role of the database lacks the right to do this."""

    code = "permission_denied"
    status = 403


class TooLarge(Terminal):
    """The request is larger than the server allows."""

    code = "too_large"
    status = 413


class UnsupportedEncoding(Terminal):
    """The server does not support the Content-Encoding of the request."""

    code = "unsupported_encoding"
    status = 415


class NotFound(Terminal):
    """It does not exist."""

    code = "not_found"
    status = 404


class NoSuchPath(NotFound):
    """There is nothing at that path."""

    code = "no_such_path"


class MethodNotAllowed(Terminal):
    """The path has no such method."""

    code = "method_not_allowed"
    status = 405


class TopicNotFound(NotFound):
    """There is no such topic."""

    code = "topic_not_found"


class GroupNotFound(NotFound):
    """The topic has no such group."""

    code = "group_not_found"


class PartitionNotFound(NotFound):
    """The topic has no such partition."""

    code = "partition_not_found"


class ProducerNotFound(NotFound):
    """There is no such producer."""

    code = "producer_not_found"


class DelayNotFound(NotFound):
    """No such delayed message is waiting."""

    code = "delay_not_found"


class TransactionNotFound(NotFound):
    """There is no such transaction."""

    code = "transaction_not_found"


class KeyNotFound(NotFound):
    """There is no such API key."""

    code = "key_not_found"


class Conflict(Terminal):
    """The call conflicts with the current state."""

    code = "conflict"
    status = 409


class TopicExists(Conflict):
    """A topic of that name already exists."""

    code = "topic_exists"


class TopicChanged(Conflict):
    """The topic's number of partitions has changed since the producer placed its messages."""

    code = "topic_changed"


class GroupExists(Conflict):
    """The topic already has a group of that name."""

    code = "group_exists"


class ScheduleExists(Conflict):
    """A schedule of that name already exists."""

    code = "schedule_exists"


class KeyExists(Conflict):
    """An API key of that name already exists."""

    code = "key_exists"


class LeaseLost(Conflict):
    """The lease no longer holds these messages: it expired, was revoked, or they were settled in another way."""

    code = "lease_lost"

    def __init__(self, message: str | None = None, remedy: str = "", *, lost: Sequence[int] = ()) -> None:
        super().__init__(message, remedy)
        self.lost = tuple(lost)
        """The offsets that the lease did not hold. The others have been settled; in a caller's transaction nothing
        has."""


class OrderConflict(Conflict):
    """A message cannot be resolved before an earlier one of its key in the same lease."""

    code = "order_conflict"


class KeysMoved(Conflict):
    """The keys of these messages belong to other partitions since the topic has grown: out of order if delivered."""

    code = "keys_moved"


class OffsetConflict(Conflict):
    """The next offset of the partition is not the expected one."""

    code = "offset_conflict"


class SequenceConflict(Conflict):
    """The producer's sequence has a gap, or is too old to be recognised as a repeat."""

    code = "sequence_conflict"


class ProducerFenced(Conflict):
    """A newer instance of this producer has taken over."""

    code = "producer_fenced"


class ProducerInUse(Conflict):
    """The producer has an open transaction."""

    code = "producer_in_use"


class TransactionOver(Conflict):
    """The transaction was aborted, timed out, or is already committed."""

    code = "transaction_over"


class PipelineFenced(Conflict):
    """A newer driver of this pipeline has taken over."""

    code = "pipeline_fenced"


class ClaimLost(Conflict):
    """A pipeline lost its whole claim before the commit; nothing of it was published."""

    code = "claim_lost"


class NotSkippable(Conflict):
    """The message is not waiting, so it cannot be skipped."""

    code = "not_skippable"


class BareGroup(Conflict):
    """The group is bare: it has a cursor and no lifecycle."""

    code = "bare_group"


class SettingsDiffer(Conflict):
    """It exists with other settings, which cannot be changed."""

    code = "settings_differ"


class LifecycleGroup(Conflict):
    """The group has a lifecycle: its position cannot be set."""

    code = "lifecycle_group"


class PipelineRefused(Terminal):
    """The pipeline cannot be run as it is written."""

    code = "pipeline_refused"


class PipelineFailed(Terminal):
    """The pipeline failed repeatedly, and no single message is the cause."""

    code = "pipeline_failed"
    status = 500


class OffsetOutOfRange(Terminal):
    """The log does not hold that offset."""

    code = "offset_out_of_range"


class PublishFailed(Transient):
    """An attempt to publish failed; the event is retried later, not before `retry_after` seconds."""

    code = "publish_failed"

    def __init__(self, message: str | None = None, remedy: str = "", *, retry_after: float | None = None) -> None:
        super().__init__(message, remedy)
        self.retry_after = retry_after


class PublisherUnavailable(Transient):
    """The destination of a publisher is down: the relay waits, for at least `retry_after` seconds. The attempt is
    counted, but no event dies of it.

    `busy`: it is only overloaded (a limit of requests), so no event is suspected to be the cause. `answered`: the
    destination, or a proxy before it, answered that (a 503). If the only event left gets that answer again and again,
    the event counts as the cause.
    """

    code = "publisher_unavailable"

    def __init__(
        self,
        message: str | None = None,
        remedy: str = "",
        *,
        busy: bool = False,
        answered: bool = False,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, remedy)
        self.busy, self.answered, self.retry_after = busy, answered, retry_after


class PublishRefused(Terminal):
    """The destination will never accept the event: it is dead at once."""

    code = "publish_refused"


class OutboxRefused(Conflict):
    """The outbox event cannot change from its state to the requested one."""

    code = "outbox_refused"


class ScheduleNotFound(NotFound):
    """There is no such schedule."""

    code = "schedule_not_found"


class EventNotFound(NotFound):
    """There is no such event in the outbox."""

    code = "event_not_found"


class IsolationLevel(Terminal):
    """Custody's verbs need a READ COMMITTED transaction."""

    code = "isolation_level"


class NeedsDatabase(Terminal):
    """This needs a direct connection to the database, but Custody was opened over HTTP."""

    code = "needs_database"


class SchemaMismatch(Terminal):
    """The database's schema does not fit this version of Custody."""

    code = "schema_mismatch"
    status = 503


class SchemaMissing(SchemaMismatch):
    """The database has no Custody schema."""

    code = "schema_missing"


class SchemaOlder(SchemaMismatch):
    """The database's schema is older than this version of Custody."""

    code = "schema_older"


class SchemaNewer(SchemaMismatch):
    """The database's schema is newer than this version of Custody."""

    code = "schema_newer"


class SchemaInUse(SchemaMismatch):
    """Objects outside of Custody's schema depend on views or functions that have to be replaced."""

    code = "schema_in_use"


class EmbeddedError(Terminal):
    """The embedded PostgreSQL could not be started or stopped."""

    code = "embedded_error"
    status = 503


class ExtraMissing(Terminal, ImportError):
    """An optional part of Custody is not installed."""

    code = "extra_missing"


class JavaMissing(Terminal):
    """No Java was found that Spark can run on."""

    code = "java_missing"
    status = 503


def _tree(root: type[CustodyError]) -> Iterator[type[CustodyError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


def by_code() -> dict[str, type[CustodyError]]:
    """Every error class by its code, to translate refusals of the database and of servers."""
    return {error.code: error for error in _tree(CustodyError) if "code" in vars(error)}


def did_you_mean(key: str, known: list[str]) -> str:
    """The remedy for an unknown name: the most similar one, or all."""
    close = difflib.get_close_matches(key, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known are: {', '.join(known)}."
