"""What a random run is made of: the verbs, what each may be given, and how often each comes."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from tests.property.model import Filter

from custody.model.outcomes import OUTCOMES, Kind

KEYS = (None, "a", "a-b", "c")
KINDS: tuple[Kind, ...] = tuple(OUTCOMES)

KEY = st.sampled_from(KEYS)
FAIR = st.sampled_from((None, "key", "tenant"))
PICK = st.integers(0, 9)
MASK = st.integers(0, 11).map(lambda bit: 1 << bit) | st.integers(1, 2**12 - 1)
DELAY = st.sampled_from((None, 0.0, 3.0, 20.0))
RETRY = st.sampled_from((True, True, False))
ERROR = st.sampled_from((None, "timeout", "bad row"))
KIND = st.sampled_from(KINDS)
VISIBILITY = st.sampled_from((10, 30, 60))
WHICH = st.builds(
    Filter,
    where_error=st.sampled_from((None, None, "time%", "lease%", "none%")),
    key=st.sampled_from((None, None, "a", "b")),
    offsets=st.none() | st.lists(st.integers(0, 40), max_size=5).map(tuple),
    limit=st.sampled_from((None, None, 1, 2)),
)

VERBS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    # single messages, or a batch
    "publish": {"keys": st.lists(KEY, min_size=4, max_size=12) | st.lists(KEY, min_size=16, max_size=24)},
    "claim": {"most": st.sampled_from((1, 2, 4, 8)), "visibility": VISIBILITY},
    "claim_many": {"most": st.sampled_from((10, 30, 60)), "visibility": VISIBILITY},
    "claim_each": {"most": st.lists(st.sampled_from((1, 1, 2, 5)), min_size=2, max_size=4), "visibility": VISIBILITY},
    "ack_all": {"pick": PICK},
    "ack_some": {"pick": PICK, "mask": MASK},
    "nack_some": {
        "pick": PICK,
        "mask": MASK,
        "error": ERROR,
        "delay": DELAY,
        "requeue": st.sampled_from((True, True, False)),
    },
    "advance": {"seconds": st.sampled_from((1, 4, 6, 12, 40, 100))},
    "nack_all": {"pick": PICK, "error": ERROR},
    "release_some": {"pick": PICK, "mask": MASK},
    "later_some": {"pick": PICK, "mask": MASK, "after": st.sampled_from((0.0, 3.0, 20.0))},
    "settle_mixed": {"pick": PICK, "mask": MASK, "kinds": st.lists(KIND, min_size=1, max_size=8), "delay": DELAY},
    "settle_strange": {"pick": PICK, "offsets": st.lists(st.integers(0, 60), min_size=1, max_size=3), "kind": KIND},
    "settle_late": {"pick": PICK, "how": st.sampled_from((*KINDS, "extend", *(f"all {kind}" for kind in KINDS)))},
    "settle_all": {"pick": PICK, "kind": KIND},
    "settle_again": {"pick": PICK, "mask": MASK},
    "extend": {"pick": PICK, "one": st.none() | st.integers(0, 60), "timeout": st.sampled_from((1, 10, 60))},
    "redrive": {"which": WHICH | st.just(Filter()), "dry_run": st.sampled_from((False, False, True))},
    "discard": {"which": WHICH},
    "rewind": {"back": st.integers(-2, 40)},
    "rewind_to_time": {"seconds": st.sampled_from((0, 10, 60))},
    "skip": {"pick": st.integers(0, 60)},
    "release_key": {"key": st.sampled_from(KEYS[1:])},
    "update": {"max_attempts": st.integers(1, 4), "hold": st.booleans(), "copies": st.booleans(), "fair": FAIR},
    "replay": {"pick": st.integers(0, 30)},
    "pause": {},
    "bind": {"name": st.sampled_from((None, "one", "star", "rest", "header", "none"))},
    "seal": {},
    "retain": {"unresolved": st.sampled_from((False, False, True)), "seal": st.sampled_from((True, True, False))},
}
OFTEN = ("claim", "publish", "ack_some", "nack_some") * 2
OFTEN += ("claim", "claim_many", "claim_each", "ack_all", "settle_mixed", "advance")
SOMETIMES = tuple(name for name in VERBS if name not in OFTEN)
# of a group that is bound: beside the others, and more often
REBINDING = ("bind", "rewind", "claim_many", "publish")
rebinding = st.sampled_from(REBINDING).flatmap(
    lambda name: st.tuples(st.just(name), st.fixed_dictionaries(VERBS[name]))
)
# each run has its own selection of the rarer verbs: with all of them at once no state would last
chosen = st.shared(st.lists(st.sampled_from(SOMETIMES), unique=True, max_size=8), key="verbs")
steps = chosen.flatmap(lambda some: st.sampled_from((*OFTEN, *some))).flatmap(
    lambda name: st.tuples(st.just(name), st.fixed_dictionaries(VERBS[name]))
)
