"""The demo: the stock example from nothing, with failures, poison, a killed worker, and a verdict that was checked."""

from custody.demo.show import run

__all__ = ["run"]
