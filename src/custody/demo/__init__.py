"""The demo: the stock example on Spark, with failures, poison, a killed driver, and a verdict that was checked."""

from custody.demo.plan import Plan
from custody.demo.show import run
from custody.demo.verdict import Check

__all__ = ["Check", "Plan", "run"]
