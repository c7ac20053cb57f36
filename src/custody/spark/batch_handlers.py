"""The handler of a `batch` pipeline: its function, and the form in which it gets its rows. This needs no Spark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from custody.errors import InvalidArgument, did_you_mean
from custody.handlers import require_callable, require_run

if TYPE_CHECKING:
    import pyarrow as pa

Form = Literal["arrow", "pandas"]
FORMS = ("arrow", "pandas")
ROWS = 10_000
"""Most rows of a call, which is also the number of messages that a task reads at once."""


@dataclass(frozen=True, kw_only=True)
class BatchHandler:
    """A function of many messages. Called in executors."""

    function: Callable[[Any], object]
    form: Form = "arrow"
    rows: int = ROWS

    def __post_init__(self) -> None:
        require_callable(self.function, "the batch handler", ("rows",))
        require_run(self.function, "the batch handler")
        form: object = self.form
        if form not in FORMS:
            raise InvalidArgument(f"form cannot be {form!r}", did_you_mean(str(form), list(FORMS)))
        rows: object = self.rows
        if not isinstance(rows, int) or isinstance(rows, bool) or not 1 <= rows <= ROWS:
            raise InvalidArgument(f"rows cannot be {rows!r}", f"Give a number from 1 to {ROWS:,}.")

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "of the pipeline")

    def __call__(self, batch: pa.RecordBatch) -> object:
        """Calls the function with these rows in its form."""
        if self.form == "arrow":
            return self.function(batch)
        # whole numbers stay whole where a value is missing
        return self.function(batch.to_pandas(types_mapper=_nullable().get, maps_as_pydicts="lossy"))


_NULLABLE: dict[Any, Any] = {}


def _nullable() -> dict[Any, Any]:
    """pandas' types with missing values, by the types of Arrow that need them."""
    if not _NULLABLE:
        import pandas as pd
        import pyarrow as pa

        widths = {pa.int8(): pd.Int8Dtype(), pa.int16(): pd.Int16Dtype(), pa.int32(): pd.Int32Dtype()}
        _NULLABLE.update({**widths, pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()})
    return _NULLABLE
