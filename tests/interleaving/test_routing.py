"""Bindings that change beside claims, and claims of a bound group side by side."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.conftest import Clock
from tests.interleaving.session import GROUP, TOPIC, Session
from tests.property.journal import fold
from tests.property.tables import Connection, Reader

import custody
from custody.model.lifecycle import MessageState

pytestmark = [pytest.mark.core, pytest.mark.req("V11", "C1")]


def make(c: custody.Custody, routes: str, *bindings: str, partitions: int = 1, **policy: object) -> None:
    """One message to partition 0 for each letter, which is its routing key."""
    c.create_topic(TOPIC, partitions=partitions)
    c.create_group(TOPIC, GROUP, custody.Policy(**policy), bindings=bindings)  # type: ignore[arg-type]
    c.publish_many(TOPIC, [custody.Outgoing(n, partition=0, routing_key=to, key=to) for n, to in enumerate(routes)])


def bind(session: Session, bindings: str | None) -> None:
    session.call("bind", topic=TOPIC, group=GROUP, bindings=bindings)


def test_binding_anew_waits_for_a_claim_and_holds_for_the_next(c: custody.Custody, one: Session, two: Session) -> None:
    make(c, "abababab", "a")
    assert one.claim(2).offsets == [0, 2]
    binding = two.blocked(bind, two, '["b"]')
    one.commit()
    binding.result(10)
    two.commit()
    assert one.claim(9).offsets == [3, 5, 7]


@pytest.mark.parametrize("before", ["a", None])
def test_a_claim_that_waited_for_a_binding_goes_by_it(
    c: custody.Custody, one: Session, two: Session, before: str | None
) -> None:
    """It had read its group before: with the old bindings what the new ones want would be passed over for good."""
    make(c, "abababab", *([before] if before else []))
    while lease := c.claim(TOPIC, GROUP, max_messages=3):
        lease.ack()
    bind(one, '["b"]')
    one.rewind(0)
    claiming = two.blocked(two.claim, 9)
    one.commit()
    assert claiming.result(10).offsets == [1, 3, 5, 7]
    two.commit()
    assert c.claim(TOPIC, GROUP).reason == "empty"


def test_a_claim_beside_a_binding_that_is_rolled_back_keeps_the_old_one(
    c: custody.Custody, one: Session, two: Session
) -> None:
    make(c, "abab", "a")
    bind(one, None)
    claiming = two.blocked(two.claim, 9)
    one.rollback()
    assert claiming.result(10).offsets == [0, 2]


def test_binding_and_deleting_a_group_at_once_end(c: custody.Custody, one: Session, two: Session) -> None:
    make(c, "ab", "a")
    one.call("delete_group", topic=TOPIC, group=GROUP)
    binding = two.blocked(bind, two, '["b"]')
    one.commit()
    with pytest.raises(Exception, match="has no group"):
        binding.result(10)


def test_two_claims_pass_over_each_message_once(
    c: custody.Custody, one: Session, two: Session, db: Connection, clock: Clock
) -> None:
    make(c, "xaxbxaxb", "a", "b", ordering="key")
    assert one.claim(1).offsets == [1]
    waiting = two.blocked(two.claim, 9)
    one.commit()
    # a is in flight with the first: its next message is parked, and x is passed over
    assert waiting.result(10).offsets == [3, 7]
    two.commit()
    folded = fold(Reader(db, TOPIC, GROUP).journal())
    assert [folded[n].state for n in (0, 2, 4, 6)] == [MessageState.DONE] * 4
    assert Reader(db, TOPIC, GROUP).read(clock()).messages[5].where == "parked"


def test_a_claim_that_is_rolled_back_has_passed_over_nothing(c: custody.Custody, one: Session, two: Session) -> None:
    make(c, "xxxa", "a")
    one.claim(1)
    one.rollback()
    assert c.stats(TOPIC, GROUP).lag == 4
    assert two.claim(1).offsets == [3]


def test_four_claimants_of_a_bound_group_get_every_bound_message_once(c: custody.Custody, db: Connection) -> None:
    make(c, "abxc" * 100, "a", "b", "c", ordering="key")

    def work() -> list[int]:
        mine: list[int] = []
        for _ in range(2000):
            lease = c.claim(TOPIC, GROUP, max_messages=7)
            if lease:
                mine += [message.offset for message in lease]
                lease.ack()
            elif c.stats(TOPIC, GROUP).depth == 0:
                return mine
        raise AssertionError("it never came to an end")

    with ThreadPoolExecutor(4) as pool:
        found = [offset for mine in [pool.submit(work) for _ in range(4)] for offset in mine.result(60)]
    assert sorted(found) == [n for n in range(400) if n % 4 != 2]
    assert {message.state for message in fold(Reader(db, TOPIC, GROUP).journal()).values()} == {MessageState.DONE}


def test_a_claim_that_waited_knows_that_the_group_is_fair_no_more(
    c: custody.Custody, one: Session, two: Session
) -> None:
    c.create_topic(TOPIC)
    c.create_group(TOPIC, GROUP, custody.Policy(ordering="key", fairness="key"))
    c.publish_many(TOPIC, [custody.Outgoing(n, key=to, routing_key=to) for n, to in enumerate("abababab")])
    one.call("update_group", topic=TOPIC, group=GROUP, policy='{"fairness": null}')
    one.call("bind", topic=TOPIC, group=GROUP, bindings='["b"]')
    claiming = two.blocked(two.claim, 9)
    one.commit()
    assert claiming.result(10).offsets == [1, 3, 5, 7]
