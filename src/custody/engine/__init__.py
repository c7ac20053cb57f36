"""The façade: every verb of Custody in one class. The interfaces call it, and nothing below it."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from custody.engine.apikeys import ApiKeys
from custody.engine.consuming import Consuming
from custody.engine.dead_letters import DeadLetters
from custody.engine.ensuring import Ensuring
from custody.engine.granting import Granting
from custody.engine.key_states import KeyStates
from custody.engine.producers import Producers
from custody.engine.surveying import Surveying
from custody.model.start import Start

__all__ = ["Custody", "Start"]


class Custody(Producers, Consuming, Ensuring, DeadLetters, KeyStates, Surveying, ApiKeys, Granting):
    """An open Custody. Safe for use by many threads; close it, or use it as a context manager."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
