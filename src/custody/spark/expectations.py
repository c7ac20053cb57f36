"""Expectations of data: `expect` names a condition, counts the messages that do not meet it, and says what becomes of
them.

The condition is a Column in a frame, a mask in a handler of batches, and any value in a handler of single messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Literal

from custody.errors import InvalidArgument, did_you_mean
from custody.model.outcomes import Dead, Retry

On = Literal["dead", "retry", "warn"]
_ON = ("dead", "retry", "warn")
UNMET: Final = "_unmet"
"""The column with the names of the expectations that a row does not meet."""

_seen: Counter[str] = Counter()


def expect(name: str, condition: Any, on: On = "dead") -> Callable[[Any], Any]:
    """Names a condition that every message should meet; null is not met.

    A message that does not meet it is dead at once, or is retried by the policy, or is only counted (`warn`). In a
    frame it goes to `DataFrame.transform`. In a handler of batches it is called with the rows, or goes to the `pipe` of
    pandas: `rows = expect("positive", mask)(rows)`. In a handler of single messages it acts at once:
    `expect("positive", amount > 0)`. Summaries and `on_batch` have the counts.
    """
    given: object = name
    if not isinstance(given, str) or not given:
        raise InvalidArgument(f"an expectation needs a name, not {name!r}", "For example expect('positive', …).")
    if on not in _ON:
        raise InvalidArgument(f"on cannot be {on!r}", did_you_mean(str(on), list(_ON)))
    if type(condition).__module__.startswith("pyspark."):
        from custody.spark.tasks.frame import expecting

        return expecting(name, condition, on)
    if hasattr(condition, "__array__") and getattr(condition, "shape", None) != ():  # () is a scalar of NumPy
        from custody.spark.tasks.marks import expecting_rows

        return expecting_rows(name, condition, on)
    return _of_a_message(name, bool(condition), on)


def reason(name: str) -> str:
    """The error of a message that does not meet an expectation."""
    return f"expectation {name!r} is not met"


def forget() -> None:
    """Another attempt begins in this process."""
    _seen.clear()


def seen() -> Counter[str]:
    """How many messages did not meet each expectation since the last call, of those in handlers of single messages."""
    found = Counter(_seen)
    _seen.clear()
    return found


def _of_a_message(name: str, met: bool, on: On) -> Callable[[Any], Any]:
    if not met:
        _seen[name] += 1
        if on != "warn":
            raise Dead(reason(name)) if on == "dead" else Retry(reason(name))
    return _unchanged


def _unchanged(rows: Any) -> Any:
    return rows
