"""spark-submit: a pipeline file that runs itself, with the database from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.spark.programs import BIN, documented, environment, finish, settings
from tests.spark.test_source import assert_hidden, with_password

import custody


def submit(directory: Path, url: str) -> tuple[int, str]:
    """What the page says, with a Spark that tells all it does."""
    file = directory / "alarms.py"
    file.write_text(documented("alarms.py"))
    command = [BIN / "spark-submit", "--master", "local[2,4]", *settings({"spark.log.level": "INFO"}), file]
    known = environment(CUSTODY_DATABASE=url, SPARK_LOCAL_DIRS=str(directory / "local"))
    code, said = finish(command, directory, known)
    (directory / "said").write_text(said)
    return code, said


@pytest.mark.chaos
@pytest.mark.req("S5")
def test_a_submitted_file_drains_its_group_and_ends_with_0(database_url: str, tmp_path: Path) -> None:
    url = with_password(database_url)
    with custody.connect(url) as c:
        for topic in ("readings", "alarms"):
            c.create_topic(topic, partitions=2)
        readings = [{"sensor": f"s{n % 7}", "celsius": float(n)} for n in range(100)]
        readings += [{"sensor": "s0", "celsius": "hot"}]
        c.publish_many("readings", [custody.Outgoing(one, key=str(one["sensor"])) for one in readings])
        code, said = submit(tmp_path, url)
        assert code == 0, said[-3000:]
        assert "100 done, 1 dead, 19 alarms" in said
        alarms = [message for p in range(2) for message in c.read("alarms", p)]
        assert sorted(alarm.payload["celsius"] for alarm in alarms) == [float(n) for n in range(81, 100)]
        assert all(alarm.key == alarm.payload["sensor"] for alarm in alarms)
        letters = c.dead("readings", "alarms")
        assert [letter.payload["celsius"] for letter in letters] == ["hot"]
    assert "MicroBatchExecution" in said, "Spark says all that it has to say"
    assert_hidden(url, "", tmp_path)


@pytest.mark.chaos
@pytest.mark.req("S5")
def test_a_pipeline_that_cannot_run_ends_a_submitted_file_with_1(database_url: str, tmp_path: Path) -> None:
    code, said = submit(tmp_path, with_password(database_url))
    assert code == 1
    assert "there is no topic 'readings'" in said
    assert_hidden(with_password(database_url), "", tmp_path)
