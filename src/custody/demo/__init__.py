"""The demo: the stock example on Spark, with failures, poison messages and a killed driver; its result is checked."""

from custody.demo.plan import Plan
from custody.demo.show import run
from custody.demo.verdict import Check

__all__ = ["Check", "Plan", "run"]
