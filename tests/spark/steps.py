"""The steps of a batch in the driver, and what a test does at the n-th time that one is reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import psycopg

from custody.spark import Files, Jdbc
from custody.spark.driver.batch_jobs import BatchJobs
from custody.spark.driver.driving import Driving
from custody.spark.outside.hadoop import Hadoop
from custody.spark.outside.lake import Lake
from custody.store.postgres import Database
from custody.verbs.pipelines import BatchReport, Committed, DriverVerbs


class Observer(Protocol):
    """Whoever is told of the steps."""

    def due(self, step: str) -> bool:
        """Whether something is done the next time that this step is reached."""

    def reached(self, step: str) -> None: ...


class Steps:
    """Counts the steps, and has the deed done that was ordered for one."""

    def __init__(self, orders: Iterable[tuple[str, int, str]], do: Callable[[str, str], None]) -> None:
        self._orders = {(step, number): deed for step, number, deed in orders}
        self._do = do
        self._reached: Counter[str] = Counter()

    def reached(self, step: str) -> None:
        self._reached[step] += 1
        deed = self._orders.get((step, self._reached[step]))
        if deed is not None:
            self._do(step, deed)

    def due(self, step: str) -> bool:
        return (step, self._reached[step] + 1) in self._orders


def watch(steps: Observer, patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Makes this process pass through the steps: logged, staged, uncommitted, committed, returned; with files or
    rows of a table written (before the commit), moved (the first file) and shown."""
    run, commit, batch = BatchJobs.work, DriverVerbs.commit, Driving._batch
    move = Hadoop.move

    def working(self: BatchJobs, *args: Any, **kwargs: Any) -> Any:
        done = run(self, *args, **kwargs)
        if done is not None:
            steps.reached("staged")
        return done

    def committing(self: DriverVerbs, number: int, work: BatchReport, **kwargs: Any) -> Committed:
        if steps.due("uncommitted"):
            with Uncommitted(self._db) as db:
                committed = commit(DriverVerbs(db, self.driver), number, work, **kwargs)
                steps.reached("uncommitted")
        else:
            committed = commit(self, number, work, **kwargs)
            steps.reached("uncommitted")
        steps.reached("committed")
        return committed

    def running(self: Driving, *args: Any) -> None:
        steps.reached("logged")
        batch(self, *args)
        steps.reached("returned")

    def then(method: Callable[..., None], step: str) -> Callable[..., None]:
        def called(self: Any, *args: Any) -> None:
            method(self, *args)
            steps.reached(step)

        return called

    def moving(self: Hadoop, *args: str) -> None:
        move(self, *args)
        steps.reached("moved")

    for owner, name, wrapped in (
        (BatchJobs, "work", working),
        (DriverVerbs, "commit", committing),
        (Driving, "_batch", running),
        (Files, "stage", then(Files.stage, "written")),
        (Jdbc, "stage", then(Jdbc.stage, "written")),
        (Hadoop, "move", moving),
        (Files, "show", then(Files.show, "shown")),
        (Lake, "show", then(Lake.show, "shown")),
        (Jdbc, "show", then(Jdbc.show, "shown")),
    ):
        patch(owner, name, wrapped)


class Uncommitted(Database):
    """Leaves what it calls in a transaction, which is open until the end of this process or of the block."""

    def __init__(self, db: Database) -> None:
        self.worker, self.clock, self._schema = db.worker, db.clock, db._schema
        self._connection = psycopg.connect(db.url)

    def call(self, function: str, /, *, on: Any = None, **arguments: Any) -> list[Any]:
        return super().call(function, on=self._connection, **arguments)

    def __enter__(self) -> Uncommitted:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
