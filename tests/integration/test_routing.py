"""Routing: what a group is not bound to is passed over, at no row; a new binding and a rewind apply to the past."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import Clock
from tests.extent import EXAMPLES
from tests.unit.test_routing import KEYS, PATTERNS, REFUSED_PATTERNS

from custody import Binding, Custody, Outgoing, Policy
from custody.errors import BareGroup, CustodyError, GroupNotFound, InvalidArgument, InvalidPayload
from custody.verbs.pipelines import PassLimit

pytestmark = [pytest.mark.core, pytest.mark.req("V11")]

TOPIC, GROUP = "orders", "eu"
ROUTES = ["orders.eu.created", "orders.us.created", None, "stock.eu"]


def start(c: Custody, count: int, *bindings: Binding | str, partitions: int = 1, **policy: Any) -> None:
    c.create_topic(TOPIC, partitions=partitions)
    c.create_group(TOPIC, GROUP, Policy(**policy), bindings=bindings)
    fill(c, count)


def fill(c: Custody, count: int, **more: Any) -> None:
    messages = [Outgoing(n, key=f"k{n % 3}", routing_key=ROUTES[n % 4], **more) for n in range(count)]
    c.publish_many(TOPIC, messages)


def drain(c: Custody, most: int = 100) -> list[int]:
    """Claims and acknowledges until it is empty; the offsets."""
    found = []
    while (lease := c.claim(TOPIC, GROUP, max_messages=most)) or lease.reason == "busy":
        if lease:
            found += [message.offset for message in lease]
            lease.ack()
    assert lease.reason == "empty"
    return found


def count(db: psycopg.Connection, table: str) -> int:
    row = db.execute(f"SELECT count(*) FROM custody.{table}").fetchone()  # type: ignore[arg-type]  # a name of our own
    assert row is not None
    return int(row[0])


def test_a_group_gets_what_it_is_bound_to_and_the_rest_is_done_at_no_row(c: Custody, db: psycopg.Connection) -> None:
    start(c, 40, "orders.eu.*")
    lease = c.claim(TOPIC, GROUP, max_messages=100)
    assert [message.offset for message in lease] == list(range(0, 40, 4))
    assert {message.routing_key for message in lease} == {"orders.eu.created"}
    assert [count(db, table) for table in ("leases", "cases", "parked", "returned")] == [1, 0, 0, 0]
    stats = c.stats(TOPIC, GROUP)
    assert (stats.lag, stats.in_flight, stats.depth) == (0, 10, 10)
    lease.ack()
    assert c.stats(TOPIC, GROUP).depth == 0
    assert [(entry.kind) for entry in c.trace(TOPIC, 0, 1)] == ["pass"]
    assert [(entry.kind) for entry in c.trace(TOPIC, 0, 4)] == ["claim", "ack"]
    kinds = [kind for (kind,) in db.execute("SELECT kind FROM custody.journal ORDER BY entry").fetchall()]
    assert kinds == ["start", "pass", "claim", "ack"]


def test_headers_several_bindings_and_messages_without_a_routing_key(c: Custody) -> None:
    start(
        c, 0, "stock.>", Binding("orders.*.created", headers={"vip": "yes"}), Binding(headers={"all": "1", "of": "2"})
    )
    given: list[tuple[str | None, dict[str, str]]] = [
        ("stock.eu", {}),
        ("orders.eu.created", {}),
        ("orders.eu.created", {"vip": "yes", "more": "x"}),
        ("orders.eu.created", {"vip": "no"}),
        ("orders.created", {"vip": "yes"}),
        (None, {"vip": "yes"}),
        (None, {"all": "1"}),
        (None, {"all": "1", "of": "2"}),
        ("anything", {"all": "1", "of": "2"}),
        (None, {}),
    ]
    c.publish_many(TOPIC, [Outgoing(None, routing_key=key, headers=headers) for key, headers in given])
    assert drain(c) == [0, 2, 7, 8]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_sql_and_python_agree_on_patterns(c: Custody, pattern: str) -> None:
    start(c, 0, pattern)
    c.publish_many(TOPIC, [*(Outgoing(key, routing_key=key) for key in KEYS), Outgoing(None)])
    assert {KEYS[offset] for offset in drain(c)} == PATTERNS[pattern]


SEGMENT = st.text(st.sampled_from("ab\\^$.|?+(){}[]-#' \n\"%éß"), min_size=1, max_size=3).map(
    lambda s: s.replace(".", "x")
)
KEY = st.lists(SEGMENT, min_size=1, max_size=3).map(".".join)
PATTERN = st.tuples(st.lists(SEGMENT | st.just("*"), max_size=2), SEGMENT | st.sampled_from("*>")).map(
    lambda parts: ".".join([*parts[0], parts[1]])
)


def test_sql_and_python_agree_on_whatever_patterns_and_keys(db: psycopg.Connection) -> None:
    @settings(max_examples=50 * EXAMPLES, deadline=None, database=None)
    @given(patterns=st.lists(PATTERN, min_size=1, max_size=4), key=KEY)
    def agree(patterns: list[str], key: str) -> None:
        row = db.execute(
            "SELECT bool_or(%s ~ (m ->> 'expression')) "
            "FROM custody.compile_bindings(%s::jsonb) b, jsonb_array_elements(b.matcher) m",
            (key, msgspec.json.encode(patterns).decode()),
        ).fetchone()
        assert row == (any(Binding(one).matches({"x-custody-routing-key": key}) for one in patterns),)

    agree()


@pytest.mark.parametrize(
    "bindings",
    [
        *([pattern] for pattern in REFUSED_PATTERNS if "\0" not in pattern),
        *({"pattern": "a"}, "a", [[]], [{}], [1], [{"pattern": 1}], [{"headers": "x"}], [{"headers": {"a": None}}]),
        *([{"headers": {"a": 1}}], [{"pattern": "a", "headers": {"a": None}}], [{"pattern": "a", "key": "b"}]),
        *([f"p{n}" for n in range(101)], [{"pattern": "a", "headers": {"n": str(n)}} for n in range(21)]),
        [".".join("a" * 33)],
        [f"{'*.' * 10}p{n}" for n in range(100)],
        [f"{'x' * 990}{n}" for n in range(11)],
        [{"headers": {str(n): "x" for n in range(21)}}],
        [{"headers": {str(n): "x" * 9000 for n in range(6)}}],
    ],
)
def test_bad_bindings_are_refused_in_sql_and_change_nothing(c: Custody, db: psycopg.Connection, bindings: Any) -> None:
    start(c, 8, "stock.*")
    with pytest.raises(psycopg.Error, match=r"pattern|binding") as refused:
        db.execute("SELECT custody.bind(%s, %s, %s)", (TOPIC, GROUP, msgspec.json.encode(bindings).decode()))
    assert refused.value.sqlstate == "CY000"
    assert c.group(TOPIC, GROUP).bindings == (Binding("stock.*"),)
    assert drain(c) == [3, 7]


def test_bad_routing_keys_and_groups_are_refused(c: Custody) -> None:
    start(c, 0)
    with pytest.raises(InvalidPayload, match="not a routing key"):
        c.publish(TOPIC, 1, routing_key="orders.*")
    with pytest.raises(InvalidPayload, match="not a routing key"):
        c.publish_many(TOPIC, [Outgoing(n, routing_key="a..b" if n == 99 else "a") for n in range(100)])
    assert c.topic(TOPIC).message_count == 0
    with pytest.raises(InvalidArgument, match="bare"):
        c.create_group(TOPIC, "mirror", bare=True, bindings=["a"])
    c.create_group(TOPIC, "mirror", bare=True)
    with pytest.raises(BareGroup):
        c.bind(TOPIC, "mirror", ["a"])
    with pytest.raises(GroupNotFound):
        c.bind(TOPIC, "nobody", ["a"])


def test_a_new_binding_holds_from_where_the_group_stands(c: Custody, db: psycopg.Connection) -> None:
    start(c, 8, "orders.eu.>")
    assert drain(c) == [0, 4]
    bound = c.bind(TOPIC, GROUP, ["stock.*", Binding("orders.us.>", headers={"x": "1"})])
    assert bound.bindings == (Binding("stock.*"), Binding("orders.us.>", headers={"x": "1"}))
    assert c.group(TOPIC, GROUP) == bound
    assert c.groups(TOPIC) == [bound]
    fill(c, 8)
    assert drain(c) == [11, 15]
    detail = db.execute("SELECT detail FROM custody.journal WHERE kind = 'policy'").fetchone()
    assert detail == ({"bindings": [{"pattern": "stock.*"}, {"pattern": "orders.us.>", "headers": {"x": "1"}}]},)
    for nothing in ([], None):
        assert c.bind(TOPIC, GROUP, nothing).bindings == ()
    fill(c, 4)
    assert drain(c) == [16, 17, 18, 19]


def test_after_a_rewind_a_new_binding_applies_to_the_past(c: Custody, db: psycopg.Connection) -> None:
    start(c, 40, "orders.eu.>")
    assert drain(c) == list(range(0, 40, 4))
    c.bind(TOPIC, GROUP, ["stock.*"])
    (rewound,) = c.rewind(TOPIC, GROUP, to_offset=8)
    assert rewound.messages == 32
    assert c.stats(TOPIC, GROUP).waiting == 32  # nobody has looked at them yet
    assert drain(c, 3) == list(range(11, 40, 4))
    assert c.stats(TOPIC, GROUP).depth == count(db, "returned") == 0
    c.bind(TOPIC, GROUP, None)
    c.rewind(TOPIC, GROUP, to_offset=30)
    assert drain(c) == list(range(30, 40))


def test_what_was_delivered_stays_whatever_is_bound_later(c: Custody, clock: Clock) -> None:
    start(c, 16, "orders.eu.>", max_attempts=2)
    lease = c.claim(TOPIC, GROUP, max_messages=100)
    failed, released, dead, expiring = lease.messages
    lease.nack(failed, delay=5)
    lease.release(released)
    lease.nack(dead, requeue=False)
    c.bind(TOPIC, GROUP, ["nothing"])
    assert [message.offset for message in c.claim(TOPIC, GROUP, max_messages=100)] == [released.offset]
    clock.move(60)
    assert set(drain(c)) == {failed.offset, released.offset, expiring.offset}
    assert c.redrive(TOPIC, GROUP) == [(0, dead.offset)]
    assert drain(c) == [dead.offset]


def test_order_counts_only_bound_messages(c: Custody, clock: Clock, db: psycopg.Connection) -> None:
    """A blocked key parks its bound messages and passes over the others."""
    c.create_topic(TOPIC)
    c.create_group(TOPIC, GROUP, Policy(ordering="key"), bindings=["in"])
    c.publish_many(TOPIC, [Outgoing(n, key="ab"[n // 2 % 2], routing_key="in" if n % 2 else "out") for n in range(12)])
    first = c.claim(TOPIC, GROUP, max_messages=2)
    assert [message.offset for message in first] == [1, 3]  # of key a and of key b
    assert c.claim(TOPIC, GROUP, max_messages=10).reason == "empty"
    parked = db.execute("SELECT key, ranges::text FROM custody.parked ORDER BY key").fetchall()
    assert parked == [("a", "{[5,6),[9,10)}"), ("b", "{[7,8),[11,12)}")]
    first.nack(first.messages[0], delay=100)
    first.ack(first.messages[1])
    assert drain(c) == [7, 11]
    clock.move(100)
    assert drain(c) == [1, 5, 9]
    assert c.stats(TOPIC, GROUP).depth == 0


def test_caps_hold_for_bound_groups(c: Custody) -> None:
    start(c, 40, "orders.eu.>", max_in_flight=3)
    lease = c.claim(TOPIC, GROUP, max_messages=10)
    assert [message.offset for message in lease] == [0, 4, 8]
    assert c.stats(TOPIC, GROUP).partitions[0].frontier == 9  # no further than it had to
    assert c.claim(TOPIC, GROUP, max_messages=10).reason == "max_in_flight"
    lease.ack(lease.messages[0])
    assert [message.offset for message in c.claim(TOPIC, GROUP, max_messages=10)] == [12]


def stretch(c: Custody, messages: int, *, routed: dict[int, str], partition: int | None = None) -> None:
    for begin in range(0, messages, 10_000):
        some = range(begin, min(begin + 10_000, messages))
        c.publish_many(TOPIC, [Outgoing(b"", routing_key=routed.get(n, "out"), partition=partition) for n in some])


def test_the_dearest_bindings_are_matched_for_a_bounded_time(c: Custody, db: psycopg.Connection) -> None:
    """At the bounds; what remains is cut by the clock, and the claims after it go on from there."""
    dice = random.Random(1)
    wild = ["".join(dice.choice(["a.", "b.", "*.", "*.", "*."]) for _ in range(30)) + "c" for _ in range(32)]
    c.create_topic(TOPIC)
    c.create_group(TOPIC, GROUP, bindings=wild)
    keys = ["".join(dice.choice("ab") + "." for _ in range(30)) + "d" for _ in range(2_000)]
    c.publish_many(TOPIC, [Outgoing(b"", routing_key=key) for key in keys])
    stops = db.execute(
        "SELECT custody.cardinality(f.looked) FROM custody.groups g, custody.heads h,"
        " custody.look(h, g.matcher, '{[0,2000)}', 1, clock_timestamp()) f"
        " WHERE g.name = %s AND h.topic_id = g.topic_id",
        [GROUP],
    ).fetchone()
    assert stops == (64,), "after its time it begins no further stretch"
    while (lease := c.claim(TOPIC, GROUP)).reason == "busy":
        assert lease.detail is not None
    assert (lease.reason, c.stats(TOPIC, GROUP).lag) == ("empty", 0)


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_claim_that_delivers_matches_nothing_while_it_holds_the_head(
    c: Custody, clock: Clock, partitions: int
) -> None:
    """Publishers wait for the head: how long must not depend on somebody's bindings."""
    c.create_topic(TOPIC, partitions=partitions)
    c.create_group(TOPIC, GROUP, bindings=["in"])
    for n in range(partitions):
        c.publish(TOPIC, "now", routing_key="in", partition=n)
        c.publish(TOPIC, "later", routing_key="in", partition=n, delay="1s")
    clock.move(1)
    seen, busy = [], 0
    while len(seen) < 2 * partitions:
        before = c.stats(TOPIC, GROUP).lag
        if lease := c.claim(TOPIC, GROUP, max_messages=10):
            seen += [message.payload for message in lease]
            continue
        busy += 1
        assert (lease.reason, lease.detail is not None) == ("busy", True), "claim again at once"
        assert c.stats(TOPIC, GROUP).lag == before + 1, "delivered, and not looked at"
    assert busy == partitions
    assert sorted(seen) == ["later"] * partitions + ["now"] * partitions


@pytest.mark.req("S4")
def test_a_pipelines_claim_that_delivers_matches_nothing_after_it(c: Custody, clock: Clock) -> None:
    """It holds the head of one partition, and could look at the others for half a second."""
    c.create_topic(TOPIC, partitions=3)
    c.create_group(TOPIC, GROUP, bindings=["in"])
    for n in range(3):
        c.publish(TOPIC, "now", routing_key="in", partition=n)
        c.publish(TOPIC, "later", routing_key="in", partition=n, delay="1s")
    drive, _ = c.drive(TOPIC, GROUP)
    clock.move(1)
    delivered = 0
    while (claim := drive.claim(100)).number is None:
        assert claim.reason == "passed"
        delivered += 1
        assert c.stats(TOPIC, GROUP).lag == 3 + delivered, "one partition was delivered to, and none looked at"
    assert delivered == 3
    assert sum(part.messages for part in drive.claimed(claim.number)) == 6


def test_a_sparse_binding_is_looked_for_in_bounded_stretches(c: Custody) -> None:
    start(c, 0, "in")
    stretch(c, 25_000, routed={24_000: "in"})
    seen = []
    for _ in range(2):
        lease = c.claim(TOPIC, GROUP)
        assert (lease.reason, lease.detail) == ("busy", "No bound message among those scanned; claim again")
        seen.append(c.stats(TOPIC, GROUP).lag)
    assert seen == [15_000, 5_000]
    lease = c.claim(TOPIC, GROUP)
    assert [message.offset for message in lease] == [24_000]
    lease.ack()
    assert c.claim(TOPIC, GROUP).reason == "empty"  # and the rest is passed
    assert c.stats(TOPIC, GROUP).lag == 0


def test_what_was_rewound_is_looked_at_in_bounded_stretches_too(c: Custody) -> None:
    start(c, 0, "in")
    stretch(c, 25_000, routed={24_000: "in"})
    assert drain(c) == [24_000]
    c.rewind(TOPIC, GROUP, to_offset=0)
    seen = []
    for _ in range(2):
        assert c.claim(TOPIC, GROUP).reason == "busy"
        seen.append(c.stats(TOPIC, GROUP).waiting)
    assert seen == [15_000, 5_000]
    assert drain(c) == [24_000]


def test_a_claim_of_many_partitions_looks_no_further_in_all(c: Custody) -> None:
    start(c, 0, "in", partitions=3)
    for partition in range(3):
        stretch(c, 8_000, routed={7_999: "in"} if partition == 2 else {}, partition=partition)
    lag, found = 24_000, []
    while not found:
        lease = c.claim(TOPIC, GROUP, max_messages=5)
        found = [(message.partition, message.offset) for message in lease]
        before, lag = lag, c.stats(TOPIC, GROUP).lag
        assert before - lag <= 10_000
        assert lease or lease.reason == "busy"
    assert found == [(2, 7_999)]


def test_a_claim_of_more_than_a_stretch_may_look_at_as_many(c: Custody) -> None:
    start(c, 0, "in", max_ack_holes=None)
    stretch(c, 15_000, routed=dict.fromkeys(range(0, 15_000, 2), "in"))
    assert len(c.claim(TOPIC, GROUP, max_messages=15_000)) == 7_500


def test_segments_are_crossed(c: Custody, db: psycopg.Connection) -> None:
    start(c, 8, "stock.*")
    db.execute("SELECT custody.seal_segment(%s)", (TOPIC,))
    fill(c, 8)
    db.execute("SELECT custody.seal_segment(%s)", (TOPIC,))
    fill(c, 8)
    assert [message.offset for message in c.claim(TOPIC, GROUP, max_messages=5)] == [3, 7, 11, 15, 19]
    assert drain(c) == [23]


@pytest.mark.req("S4")
def test_a_pipelines_claims_pass_over_what_is_not_bound(c: Custody) -> None:
    start(c, 0, "in", partitions=2)
    for partition in range(2):
        stretch(c, 12_000, routed={11_000: "in", 11_500: "in"}, partition=partition)
    drive, only = c.drive(TOPIC, GROUP)
    c.publish_many(TOPIC, [Outgoing(b"", routing_key="in", partition=n % 2) for n in range(4)])
    lags = []
    while (claim := drive.claim(100, only)).number is None:
        assert claim.reason == "passed"
        lags.append(c.stats(TOPIC, GROUP).lag)
    assert lags == [14_004, 4_004]  # 5,000 of each partition at a time
    parts = drive.claimed(claim.number)
    assert [(part.partition, part.ranges) for part in parts] == [
        (partition, ((11_000, 11_001), (11_500, 11_501))) for partition in range(2)
    ]
    drive.release()
    rest = PassLimit(until=(11_200, 11_200), due=None)
    while (claim := drive.claim(100, rest)).number is None:
        assert claim.reason == "passed"
    assert sum(part.messages for part in drive.claimed(claim.number)) == 4  # they came back: a release is no rewind
    drive.release()
    c.bind(TOPIC, GROUP, ["out"])
    c.rewind(TOPIC, GROUP, to_offset=10_990)
    claim = drive.claim(100)
    assert claim.number is not None
    assert [(part.partition, part.ranges) for part in drive.claimed(claim.number)] == [
        (partition, ((10_990, 11_000), (11_001, 11_041))) for partition in range(2)
    ]


def test_the_error_names_the_remedy() -> None:
    with pytest.raises(CustodyError, match=r"orders\.\*\.created"):
        Binding("orders*")


def test_a_group_is_bound_or_fair_but_not_both(c: Custody) -> None:
    c.create_topic(TOPIC)
    fair = Policy(ordering="key", fairness="key")
    with pytest.raises(InvalidArgument, match="bound and fair"):
        c.create_group(TOPIC, GROUP, fair, bindings=["in"])
    c.create_group(TOPIC, GROUP, fair)
    with pytest.raises(InvalidArgument, match="bound and fair"):
        c.bind(TOPIC, GROUP, ["in"])
    assert c.group(TOPIC, GROUP).bindings == ()
    c.update_group(TOPIC, GROUP, Policy(ordering="key"))
    c.bind(TOPIC, GROUP, ["in"])
    with pytest.raises(InvalidArgument, match="bound and fair"):
        c.update_group(TOPIC, GROUP, fair)


def test_a_rewound_stretch_behind_what_was_released_and_is_blocked_is_found(c: Custody) -> None:
    """What came back otherwise lies before the rewound stretch, and all of it has to be parked."""
    c.create_topic(TOPIC)
    c.create_group(TOPIC, GROUP, Policy(ordering="key"), bindings=["in"])
    c.publish_many(TOPIC, [Outgoing(n, key="aabb"[n], routing_key="in") for n in range(4)])
    first, second = c.claim(TOPIC, GROUP, max_messages=2), c.claim(TOPIC, GROUP, max_messages=2)
    second.ack()
    c.rewind(TOPIC, GROUP, to_offset=2)
    first.release(first.messages[1])  # behind the first one of its key, which is in flight
    assert [message.offset for message in c.claim(TOPIC, GROUP, max_messages=2)] == [2, 3]


def test_blocked_messages_of_a_rewound_stretch_are_parked_in_one_claim(c: Custody, clock: Clock) -> None:
    """A claim of one goes on until it finds something, or has parked and passed over all there is."""
    c.create_topic(TOPIC)
    c.create_group(TOPIC, GROUP, Policy(ordering="key"), bindings=["in"])
    c.publish_many(TOPIC, [Outgoing(n, key="a", routing_key="in" if n % 2 else "out") for n in range(40)])
    assert len(drain(c)) == 20
    c.rewind(TOPIC, GROUP, to_offset=0)
    lease = c.claim(TOPIC, GROUP)
    assert [message.offset for message in lease] == [1]
    assert c.claim(TOPIC, GROUP).reason == "empty"
    lease.nack(delay=10)
    assert c.claim(TOPIC, GROUP).reason == "empty"
    clock.move(10)
    assert drain(c) == list(range(1, 40, 2))
