"""The columns of settings: those of a policy and of a retention, with the defaults and the bounds of their fields."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.sql import SQL, Identifier

from custody import Breaker, Custody, Exponential, Policy, Retention
from custody.model.limits import LARGEST
from custody.model.policy import LONGEST, Duration
from custody.model.retention import Size
from custody.model.setting import Setting, settings_of

pytestmark = pytest.mark.core

REFUSED = (
    psycopg.errors.CheckViolation,
    psycopg.errors.NumericValueOutOfRange,
    psycopg.errors.NotNullViolation,
    psycopg.errors.InvalidTextRepresentation,
)


def columns_of(kind: Any, prefix: str = "", *, optional: bool = False) -> Iterator[tuple[str, Setting, bool]]:
    """Each column with its setting, and whether it may be null: the first one, if all of them may be missing."""
    for number, setting in enumerate(settings_of(kind)):
        if setting.nested is None:
            yield prefix + setting.column, setting, setting.optional or (optional and number == 0)
    if kind is Policy:
        yield from columns_of(Exponential, "backoff_")
        yield from columns_of(Breaker, optional=True)


POLICY = list(columns_of(Policy))
RETENTION = list(columns_of(Retention))


def bounds(setting: Setting) -> tuple[list[Any], list[Any]]:
    """Values at the bounds, and right beyond them."""
    least, most = setting.meta.ge, setting.meta.le
    if setting.choices:
        return list(setting.choices), ["other", ""]
    if setting.kind is bool:
        return [True, False], []
    if setting.kind is str:
        longest = setting.meta.max_length or 0
        return ["x", "x" * longest], ["", "x" * (longest + 1)]
    if setting.kind == Duration:
        first, last = timedelta(seconds=least or 0), timedelta(seconds=LONGEST)
        tick = timedelta(microseconds=1)
        return [first, last], [first - tick, last + tick]
    if setting.kind == Size:
        least, most = 1, LARGEST
    assert least is not None
    assert most is not None
    tick = 0.001 if setting.kind is float else 1
    return [least, most], [least - tick, most + tick]


@pytest.mark.req("G8")
def test_the_columns_of_a_policy_are_its_settings(c: Custody, db: psycopg.Connection[Any]) -> None:
    real = dict(db.execute("SELECT name, NOT needed FROM custody.policy_columns()").fetchall())
    assert real == {"backoff_kind": False, **{column: optional for column, _, optional in POLICY}}
    assert set(real) == Policy(breaker=Breaker()).columns().keys()
    c.create_topic("orders")
    db.execute("SELECT custody.create_group('orders', 'plain')")
    db.execute("""SELECT custody.create_group('orders', 'guarded', '{"breaker_rate": 0.5}')""")
    assert c.group("orders", "plain").policy == Policy()
    assert c.group("orders", "guarded").policy == Policy(breaker=Breaker())


def takes(db: psycopg.Connection[Any], table: str, column: str, value: Any) -> bool:
    update = SQL("UPDATE {} SET {} = %s").format(Identifier("custody", table), Identifier(column))
    try:
        with db.transaction(force_rollback=True):
            db.execute(update, [value])
    except REFUSED:
        return False
    return True


@pytest.mark.parametrize(("table", "columns"), [("groups", POLICY), ("topics", RETENTION)])
def test_the_columns_have_the_bounds_of_their_settings(
    c: Custody, db: psycopg.Connection[Any], table: str, columns: list[tuple[str, Setting, bool]]
) -> None:
    c.create_topic("orders")
    c.create_group("orders", "stock", Policy(ordering="key"))
    for column, setting, optional in columns:
        inside, outside = bounds(setting)
        for value in [*inside, None] if optional else inside:
            assert takes(db, table, column, value), f"{column} refuses {value!r}"
        for value in outside if optional else [*outside, None]:
            assert not takes(db, table, column, value), f"{column} takes {value!r}"
