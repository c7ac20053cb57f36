"""Settings: custody.yaml, the environment that beats it, and what is refused."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from custody.config import load
from custody.errors import InvalidArgument, InvalidConfig
from custody.model.policy import Exponential, Policy, seconds

FILE = """
defaults:
  topic:
    delivery:
      visibilityTimeout: 45s
      maxRetries: 7
      initialRetryDelay: 250ms
      maxRetryDelay: 1m
      retryBackoffMultiplier: 3
"""


def write(directory: Path, text: str, name: str = "custody.yaml") -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.req("G8")
def test_without_a_file_or_environment_the_defaults_hold(tmp_path: Path) -> None:
    config = load({}, tmp_path)
    assert config.home == tmp_path / ".custody"
    assert config.database is None
    assert config.policy == Policy()


@pytest.mark.req("G8")
def test_the_file_sets_the_delivery_defaults(tmp_path: Path) -> None:
    write(tmp_path, FILE)
    policy = load({}, tmp_path).policy
    assert policy.max_attempts == 7
    assert policy.visibility_timeout == timedelta(seconds=45)
    assert policy.backoff == Exponential("250ms", cap="1m", multiplier=3)


@pytest.mark.req("G8")
def test_the_environment_beats_the_file(tmp_path: Path) -> None:
    write(tmp_path, FILE + "home: from-file\ndatabase: postgresql://file/db\n")
    config = load(
        {
            "CUSTODY_HOME": "/from/environment",
            "CUSTODY_DATABASE": "postgresql://environment/db",
            "CUSTODY_VISIBILITY_TIMEOUT": "2m",
            "CUSTODY_MAX_RETRIES": "9",
            "CUSTODY_INITIAL_RETRY_DELAY": "1s",
            "CUSTODY_MAX_RETRY_DELAY": "10s",
            "CUSTODY_RETRY_BACKOFF_MULTIPLIER": "1.5",
        },
        tmp_path,
    )
    assert config.home == Path("/from/environment")
    assert config.database == "postgresql://environment/db"
    assert seconds(config.policy.visibility_timeout) == 120
    assert config.policy.max_attempts == 9
    assert config.policy.backoff == Exponential("1s", cap="10s", multiplier=1.5)


def test_the_embedded_database_is_found_from_below(tmp_path: Path) -> None:
    below = tmp_path / "project" / "src" / "deep"
    below.mkdir(parents=True)
    assert load({}, below).home == below / ".custody"
    (tmp_path / ".custody" / "data").mkdir(parents=True)
    assert load({}, below).home == tmp_path / ".custody"
    (below.parent / ".custody" / "data").mkdir(parents=True)
    assert load({}, below).home == below.parent / ".custody"
    (below / ".custody").mkdir()  # without a database
    assert load({}, below).home == below.parent / ".custody"
    assert load({"CUSTODY_HOME": "/elsewhere"}, below).home == Path("/elsewhere")


def test_the_file_names_home_and_database(tmp_path: Path) -> None:
    write(tmp_path, "home: /var/lib/custody\ndatabase: postgresql://file/db\n")
    config = load({}, tmp_path)
    assert (config.home, config.database) == (Path("/var/lib/custody"), "postgresql://file/db")


def test_an_empty_variable_counts_as_absent(tmp_path: Path) -> None:
    write(tmp_path, FILE)
    empty = {"CUSTODY_HOME": "", "CUSTODY_DATABASE": "", "CUSTODY_MAX_RETRIES": "", "CUSTODY_CONFIG": ""}
    config = load(empty, tmp_path)
    assert (config.home, config.database, config.policy.max_attempts) == (tmp_path / ".custody", None, 7)
    (tmp_path / "custody.yaml").unlink()
    assert load(empty, tmp_path).policy == Policy()


def test_an_empty_file_is_no_settings(tmp_path: Path) -> None:
    write(tmp_path, "# nothing yet\n")
    assert load({}, tmp_path).policy == Policy()


def test_custody_config_names_another_file_which_has_to_exist(tmp_path: Path) -> None:
    other = write(tmp_path, "home: /elsewhere\n", "other.yaml")
    assert load({"CUSTODY_CONFIG": str(other)}, tmp_path).home == Path("/elsewhere")
    with pytest.raises(InvalidConfig, match="which CUSTODY_CONFIG names"):
        load({"CUSTODY_CONFIG": str(tmp_path / "missing.yaml")}, tmp_path)


@pytest.mark.req("G8")
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("hom: x\n", "Did you mean 'home'"),
        ("defaults: {topics: {}}\n", "Did you mean 'topic'"),
        ("defaults: {topic: {delivery: {maxRetrys: 3}}}\n", "Did you mean 'maxRetries'"),
        ("defaults: {topic: {delivery: {max_retries: 3}}}\n", "Did you mean 'maxRetries'"),
        ("defaults: [1]\n", "defaults must be a mapping"),
        ("just text\n", "custody.yaml must be a mapping"),
        ("a: [1\n", "not valid YAML"),
        ("defaults: {topic: {delivery: {maxRetries: many}}}\n", "maxRetries must be a number"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    write(tmp_path, text)
    with pytest.raises(InvalidConfig, match=complaint):
        load({}, tmp_path)


@pytest.mark.parametrize(
    "setting",
    ["visibilityTimeout: soon", "maxRetries: 0", "maxRetries: 2.5", "retryBackoffMultiplier: 0", "maxRetryDelay: -1"],
)
def test_a_value_that_no_policy_may_have_is_refused(tmp_path: Path, setting: str) -> None:
    write(tmp_path, f"defaults: {{topic: {{delivery: {{{setting}}}}}}}\n")
    with pytest.raises(InvalidArgument):
        load({}, tmp_path)
