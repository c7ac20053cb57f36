"""An app: the handlers and schedules of one program, registered by decorators, and run in one process."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from msgspec import UNSET, UnsetType

from custody.connection import connect
from custody.engine import Custody
from custody.errors import (
    CustodyError,
    Forbidden,
    GroupNotFound,
    InvalidArgument,
    PermissionDenied,
    ScheduleNotFound,
    TopicNotFound,
    did_you_mean,
)
from custody.handlers import is_coroutine_function, payload_of, require_handler
from custody.model.entities import NAME, Message
from custody.model.outcomes import Skip
from custody.model.policy import Duration, Policy
from custody.model.retention import Retention
from custody.model.routing import Binding
from custody.model.schedule import SCHEDULE, SCHEDULED_AT, SUPERSEDED_AT, Missed, Schedule, Timing
from custody.model.start import Start
from custody.worker import Worker, WorkerSummary
from custody.worker.signals import stopped_by_signals

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

KEPT = Retention(time="30d")
"""How long ticks are kept, if the app creates their topic."""
ATTEND = 30.0
"""Seconds after which a running app says again that it runs."""


@dataclass(frozen=True, kw_only=True)
class Subscription:
    """A handler and the group whose messages it gets."""

    topic: str
    group: str
    handler: Callable[..., Any]
    policy: Policy | None = None
    start: Start = "earliest"
    bindings: Iterable[Binding | str] | UnsetType | None = UNSET
    partitions: int | None = None
    retention: Retention | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its worker."""

    @property
    def name(self) -> str:
        return f"{self.topic}/{self.group}"


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """A schedule that the app declares, and the handler of its ticks."""

    name: str
    timing: Timing
    missed: Missed
    subscription: Subscription


class App:
    """Handlers and schedules of one program. `custody work app.py` runs them, and so does `app.run()`.

    `name` says which app declares a schedule; by default it is the name of the file. Ticks of schedules are messages of
    `schedules_topic`, in which each schedule has a group of its own name.
    """

    def __init__(self, name: str | None = None, *, schedules_topic: str = "schedules") -> None:
        if name is not None:
            _require_name("an app", name)
        self.name = name
        self.schedules_topic = schedules_topic
        self.subscriptions: dict[str, Subscription] = {}
        self.schedules: dict[str, Scheduled] = {}

    def on(
        self,
        topic: str,
        *,
        group: str,
        policy: Policy | None = None,
        payload: type | None = None,
        concurrency: int = 8,
        partitions: int | None = None,
        bindings: Iterable[Binding | str] | UnsetType | None = UNSET,
        start: Start = "earliest",
        max_messages: int | None = None,
        visibility_timeout: Duration | None = None,
    ) -> Callable[[F], F]:
        """Decorates the handler of a group: a function or a coroutine function of one message.

        The topic and the group are created when the app starts, or changed to what is given here (`ensure_topic`,
        `ensure_group`). `payload`, `concurrency` and the rest are those of `Custody.work`.
        """
        settings = {
            "concurrency": concurrency,
            "payload": payload_of(None, payload),
            "max_messages": max_messages,
            "visibility_timeout": visibility_timeout,
        }

        def register(handler: F) -> F:
            require_handler(handler, generators=False, coroutines=True)
            self._add(
                Subscription(
                    topic=topic,
                    group=group,
                    handler=handler,
                    policy=policy,
                    start=start,
                    bindings=bindings,
                    partitions=partitions,
                    settings=settings,
                )
            )
            return handler

        return register

    def every(
        self,
        interval: Duration,
        *,
        name: str | None = None,
        missed: Missed = "skip",
        policy: Policy | None = None,
        concurrency: int = 1,
    ) -> Callable[[F], F]:
        """Decorates a function that runs every so often, first one interval after its schedule is created. It takes
        the message of the tick, or nothing.

        Of the times that were missed, `skip` runs only the newest; `catch_up` runs all, each with its own message.
        """
        return self._scheduled(Timing.of(interval, None, "UTC"), name, missed, policy, concurrency)

    def cron(
        self,
        expression: str,
        *,
        tz: str = "UTC",
        name: str | None = None,
        missed: Missed = "skip",
        policy: Policy | None = None,
        concurrency: int = 1,
    ) -> Callable[[F], F]:
        """Decorates a function that runs by a cron expression in a time zone; see `every`."""
        return self._scheduled(Timing.of(None, expression, tz), name, missed, policy, concurrency)

    def _scheduled(
        self, timing: Timing, name: str | None, missed: Missed, policy: Policy | None, concurrency: int
    ) -> Callable[[F], F]:
        def register(function: F) -> F:
            named = str(name or getattr(function, "__name__", ""))
            _require_name("a schedule", named)
            if named in self.schedules:
                raise InvalidArgument(f"the app has two schedules {named!r}", "Give one of them another name=….")
            handler = _taking_message(function)
            require_handler(handler, generators=False, coroutines=True)
            subscription = Subscription(
                topic=self.schedules_topic,
                group=named,
                handler=handler,
                policy=policy,
                start="latest",  # a schedule of this name may have been deleted before
                bindings=[Binding(headers={SCHEDULE: named})],
                retention=KEPT,
                settings={"concurrency": concurrency},
            )
            self._add(subscription)
            self.schedules[named] = Scheduled(name=named, timing=timing, missed=missed, subscription=subscription)
            return function

        return register

    def _add(self, subscription: Subscription) -> None:
        if subscription.name in self.subscriptions:
            raise InvalidArgument(
                f"the app has two handlers for group {subscription.group!r} of topic {subscription.topic!r}",
                "Give one of them another group: each group gets every message.",
            )
        self.subscriptions[subscription.name] = subscription

    def run(self, c: Custody | None = None, *, grace: Duration = "30s") -> dict[str, WorkerSummary]:
        """Runs all handlers until SIGTERM or Ctrl-C. Returns what became of the messages, by topic and group.

        Without `c` it connects as `custody.connect()` does.
        """
        if c is None:
            with connect() as opened:
                return self.run(opened, grace=grace)
        running = self.start(c, grace=grace)
        with stopped_by_signals(running.stop):
            return running.run()

    def start(self, c: Custody, *, grace: Duration = "30s", only: Iterable[str] = ()) -> RunningApp:
        """The app ready to run, in a thread of yours: `run()` it there, and `stop()` it. Creates what is missing.

        `only` names the handlers (`topic/group`, or a schedule) that this process runs.
        """
        return RunningApp(self, c, self._chosen(only), grace=grace)

    def _chosen(self, only: Iterable[str]) -> list[Subscription]:
        chosen = set()
        for name in only:
            place = self.schedules[name].subscription.name if name in self.schedules else name
            if place not in self.subscriptions:
                known = [*self.schedules, *self.subscriptions]
                raise InvalidArgument(f"the app has no handler {name!r}", did_you_mean(name, known))
            chosen.add(place)
        found = [one for one in self.subscriptions.values() if not chosen or one.name in chosen]
        if not found:
            raise InvalidArgument("the app has no handlers", 'Register one: @app.on("orders", group="stock").')
        return found


class RunningApp:
    """An app on a connection: its topics, groups and schedules are there, and it has a worker for each handler."""

    def __init__(self, app: App, c: Custody, subscriptions: Iterable[Subscription], *, grace: Duration) -> None:
        self.name = app.name or "app"
        self._c = c
        chosen = {one.name: one for one in subscriptions}
        self._schedules = [one for one in app.schedules.values() if one.subscription.name in chosen]
        self._declared = [*app.schedules]
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self.changes = [line for one in chosen.values() for line in _ensure(c, one)]
        """What was missing in the database and has been created, and schedules that differ from the code."""
        self.workers = {name: self._worker(one, grace) for name, one in chosen.items()}
        """The workers by topic and group."""
        for scheduled in self._schedules:  # after their groups, so that no tick is missed
            self._declare(scheduled)
        if self._schedules:
            self._attend()
            self._warn_of_strays()

    def _worker(self, one: Subscription, grace: Duration) -> Worker:
        handler = one.handler
        if any(one is scheduled.subscription for scheduled in self._schedules):
            handler = _unless_superseded(handler, self._c.schedule)
        return self._c.worker_for(one.topic, one.group, handler, grace=grace, **one.settings)

    def _declare(self, scheduled: Scheduled) -> None:
        timing = scheduled.timing
        found = self._c.ensure_schedule(
            scheduled.name,
            topic=scheduled.subscription.topic,
            every=timing.every,
            cron=timing.cron,
            tz=timing.tz,
            missed=scheduled.missed,
            app=self.name,
        )
        if found.edited:
            self.changes.append(f"schedule {scheduled.name} is not as in the code: an operator has edited it")

    def _attend(self) -> list[str]:
        """Records that the schedules have a process. Returns those of the app that are not named."""
        return self._c.attend_schedules(self.name, [one.name for one in self._schedules])

    def _warn_of_strays(self) -> None:
        for name in self._attend():
            if name not in self._declared:
                logger.warning(
                    "schedule %s of app %s has no code here, so its ticks wait. If it is not needed any more: "
                    "custody schedules delete %s", name, self.name, name,
                )  # fmt: skip

    def stop(self) -> None:
        """Stops all workers gracefully."""
        self._ended.set()
        for worker in self.workers.values():
            worker.stop()

    def run(self) -> dict[str, WorkerSummary]:
        """Works until `stop`. If one worker fails for good, for example because its topic was deleted, all stop, and
        its error is raised."""
        summaries: dict[str, WorkerSummary] = {}
        threads = [
            threading.Thread(target=self._run, args=[name, worker, summaries], name=f"custody-{name}", daemon=True)
            for name, worker in self.workers.items()
        ]
        with self._attending():
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            finally:
                self.stop()
        if self._error is not None:
            raise self._error
        return {name: summaries[name] for name in self.workers}

    def _run(self, name: str, worker: Worker, summaries: dict[str, WorkerSummary]) -> None:
        try:
            summaries[name] = worker.run()
        except BaseException as error:
            self._error = self._error or error
            self.stop()

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """While the block runs, the schedules of the app are attended."""
        ended = threading.Event()

        def attend() -> None:
            while not ended.wait(ATTEND):
                try:
                    self._attend()
                except CustodyError as error:
                    logger.warning("the schedules of app %s could not be attended: %s", self.name, error)

        if self._schedules:
            threading.Thread(target=attend, name="custody-attendance", daemon=True).start()
        try:
            yield
        finally:
            ended.set()


def _ensure(c: Custody, one: Subscription) -> Iterator[str]:
    """Creates the topic and the group, or brings them up to the settings of the code. Says what was missing."""
    try:
        c.topic(one.topic)
        with _allowed(f"changes topic {one.topic}"):
            c.ensure_topic(one.topic, partitions=one.partitions)
    except TopicNotFound:
        with _allowed(f"creates topic {one.topic}"):
            c.ensure_topic(one.topic, partitions=one.partitions, retention=one.retention)
        yield f"created topic {one.topic}"
    try:
        c.group(one.topic, one.group)
    except GroupNotFound:
        yield f"created group {one.group} of topic {one.topic}"
    with _allowed(f"creates or changes group {one.group} of topic {one.topic}"):
        c.ensure_group(one.topic, one.group, one.policy, start=one.start, bindings=one.bindings)


@contextmanager
def _allowed(does: str) -> Iterator[None]:
    """Says what the app does that its role of the database, or its API key, may not do."""
    try:
        yield
    except (PermissionDenied, Forbidden) as error:
        raise type(error)(
            f"the app {does}, and may not: {error.message}",
            "Run the app once with the rights of an operator, or do it by hand before it starts.",
        ) from error


def _require_name(what: str, name: str) -> None:
    if not re.match(NAME, name):
        raise InvalidArgument(
            f"{name!r} cannot be the name of {what}",
            "Give a name=… of letters, digits, dots, dashes and underscores, starting with a letter or digit.",
        )


def _taking_message(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a handler: one without parameters is called without the message."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return function
    if is_coroutine_function(function):

        async def call_later(_message: Message) -> object:
            return await function()

        return call_later

    def call(_message: Message) -> object:
        return function()

    return call


def _unless_superseded(handler: Callable[..., Any], schedule: Callable[[str], Schedule]) -> Callable[..., Any]:
    """The handler of a tick, skipped if a newer tick of its schedule has been published meanwhile and missed ticks are
    skipped. A retry is not skipped."""

    def check(message: Message) -> None:
        if is_superseded(message, schedule):
            raise Skip(f"the tick of {message.headers[SCHEDULED_AT]} was missed, and there is a newer one")

    if is_coroutine_function(handler):

        @functools.wraps(handler)
        async def handle_later(message: Message) -> object:
            await asyncio.to_thread(check, message)
            return await handler(message)

        return handle_later

    @functools.wraps(handler)
    def handle(message: Message) -> object:
        check(message)
        return handler(message)

    return handle


def is_superseded(
    message: Message, schedule: Callable[[str], Schedule], now: Callable[[], datetime] = lambda: datetime.now(UTC)
) -> bool:
    """Whether a newer tick exists. Only a tick that is late by the local clock needs a look at its schedule."""
    superseded = message.headers.get(SUPERSEDED_AT)
    if superseded is None or message.attempt > 1 or now() < datetime.fromisoformat(superseded):
        return False
    try:
        last = schedule(message.headers[SCHEDULE]).last_at
    except ScheduleNotFound:
        return False
    return last is not None and last > datetime.fromisoformat(message.headers[SCHEDULED_AT])
