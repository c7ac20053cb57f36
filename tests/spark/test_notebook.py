"""A notebook: cells in an interactive `__main__`, handlers defined anew, a run in a thread, an interrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.spark.programs import environment
from tests.waiting import wait_for

import custody

CELLS = """
import threading
import custody
from custody.spark import Pipeline
from custody.spark.session import session
c = custody.connect()
spark = session(master="local[2,4]", config={"spark.ui.enabled": "false"})

def screening():
    return Pipeline(source="in", group="g", sink="out")

pipeline = screening()

@pipeline.each
def handle(message):
    return {"cell": 1, "n": message.payload["n"]}

print("first", pipeline.run(c, available_now=True).done)

try:
    @pipeline.each
    def handle(message):
        return {"cell": 2, "n": message.payload["n"]}
except custody.CustodyError as error:
    print(error.code)

pipeline = screening()
number = 2

@pipeline.each
def handle(message):
    return {"cell": number, "n": message.payload["n"]}

ignored = c.publish_many("in", [{"n": n} for n in range(10, 20)])
print("second", pipeline.run(c, available_now=True).done)

stop = threading.Event()
number = 3
summaries = []
running = threading.Thread(target=lambda: summaries.append(pipeline.run(c, stop=stop)))
running.start()
ignored = c.publish_many("in", [{"n": n} for n in range(20, 30)])
while len(c.read("out", 0)) < 30:
    ignored = stop.wait(0.05)

stop.set()
running.join()
print("third", summaries[0].done)

number = 4
summary = pipeline.run(c)
print("interrupted", summary.done)

print("alive", spark.range(3).count())
spark.stop()
c.close()
"""


@pytest.mark.slow
@pytest.mark.req("S5")
def test_cells_one_after_another(database_url: str, tmp_path: Path) -> None:
    with custody.connect(database_url) as c, (tmp_path / "said").open("w+") as said:
        c.create_topic("in")
        c.create_topic("out")
        c.publish_many("in", [{"n": n} for n in range(10)])
        notebook = subprocess.Popen(
            [sys.executable, "-i", "-q"],
            env=environment(CUSTODY_DATABASE=database_url),
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )

        def printed(text: str) -> bool:
            assert notebook.poll() is None, Path(said.name).read_text()
            return text in Path(said.name).read_text()

        try:
            assert notebook.stdin is not None
            notebook.stdin.write(CELLS)
            notebook.stdin.flush()
            wait_for(lambda: printed("third 10"), lambda: Path(said.name).read_text(), timeout=150)
            c.publish_many("in", [{"n": n} for n in range(30, 40)])
            wait_for(lambda: len(c.read("out", 0)) == 40, lambda: Path(said.name).read_text(), timeout=60)
            os.kill(notebook.pid, signal.SIGINT)
            wait_for(lambda: printed("alive 3"), lambda: Path(said.name).read_text(), timeout=60)
            notebook.stdin.close()
            assert notebook.wait(60) == 0
        finally:
            if notebook.poll() is None:
                os.killpg(notebook.pid, signal.SIGKILL)
                notebook.wait()
        shown = Path(said.name).read_text()
        for text in ("first 10", "invalid_argument", "second 10", "third 10", "interrupted 10"):
            assert f"{text}\n" in shown
        assert "Traceback" not in shown
        out = sorted((message.payload["n"], message.payload["cell"]) for message in c.read("out", 0))
        assert out == [(n, n // 10 + 1) for n in range(40)], "each cell's own handler, each message once"
