"""Settings, read in one place. Arguments come first, then the environment, then `custody.yaml`, then the defaults."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from custody.errors import InvalidConfig, did_you_mean
from custody.model.policy import Backoff, Exponential, Policy, seconds

_DELIVERY = {
    "visibilityTimeout": "CUSTODY_VISIBILITY_TIMEOUT",
    "maxRetries": "CUSTODY_MAX_RETRIES",
    "initialRetryDelay": "CUSTODY_INITIAL_RETRY_DELAY",
    "maxRetryDelay": "CUSTODY_MAX_RETRY_DELAY",
    "retryBackoffMultiplier": "CUSTODY_RETRY_BACKOFF_MULTIPLIER",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """`home` is the directory of the embedded database; `database` is the URL of another one, or of a server; `policy`
    is the default of new groups. For a server: the API key, the file of the authority that signs its certificate, and
    whether the key may be sent without TLS."""

    home: Path
    database: str | None
    policy: Policy
    api_key: str | None = field(default=None, repr=False)
    ca: Path | None = None
    allow_insecure: bool = False
    listen_url: str | None = None
    """The URL for LISTEN, if `database` leads to a connection pooler."""
    source: str = ""
    """The name of this outbox when its relay publishes to another Custody."""


def this_process() -> str:
    """The default name of a worker or client: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _nearest_home(directory: Path) -> Path:
    """The embedded database of the directory or of one above it, as git finds its repository; else the place of a new
    one."""
    for place in (directory, *directory.resolve().parents):
        if (place / ".custody" / "data").is_dir():
            return place / ".custody"
    return directory / ".custody"


def load(environment: Mapping[str, str] = os.environ, directory: Path | None = None) -> Config:
    """Reads `custody.yaml` (or CUSTODY_CONFIG) and the environment. Refuses unknown settings."""
    directory = directory or Path.cwd()
    path = Path(environment.get("CUSTODY_CONFIG") or directory / "custody.yaml")
    document: Any = {}
    if path.exists():
        import yaml  # most processes have no such file

        try:
            document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except yaml.YAMLError as error:
            raise InvalidConfig(f"{path.name} is not valid YAML: {error}", "Correct the file.") from error
    elif environment.get("CUSTODY_CONFIG"):
        raise InvalidConfig(f"there is no file {path}, which CUSTODY_CONFIG names", "Correct or unset CUSTODY_CONFIG.")
    settings = _section(document, path.name, ["home", "database", "listenUrl", "defaults"])
    topic = _section(
        _section(settings.get("defaults"), "defaults", ["topic"]).get("topic"), "defaults.topic", ["delivery"]
    )
    delivery = _section(topic.get("delivery"), "defaults.topic.delivery", list(_DELIVERY))
    for name, variable in _DELIVERY.items():
        if environment.get(variable):
            delivery[name] = environment[variable]
    return Config(
        home=Path(environment.get("CUSTODY_HOME") or settings.get("home") or _nearest_home(directory)),
        database=environment.get("CUSTODY_DATABASE") or settings.get("database"),
        policy=_policy(delivery),
        api_key=environment.get("CUSTODY_API_KEY") or None,
        ca=Path(environment["CUSTODY_CA"]) if environment.get("CUSTODY_CA") else None,
        source=environment.get("CUSTODY_SOURCE") or "",
        allow_insecure=_flag(environment, "CUSTODY_ALLOW_INSECURE"),
        listen_url=environment.get("CUSTODY_LISTEN_URL") or settings.get("listenUrl"),
    )


def _flag(environment: Mapping[str, str], name: str) -> bool:
    given = environment.get(name, "").lower()
    if given in ("1", "true", "yes"):
        return True
    if given in ("", "0", "false", "no"):
        return False
    raise InvalidConfig(f"{name} cannot be {given!r}", "Use 1 or 0.")


def _section(value: Any, where: str, known: list[str]) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidConfig(f"{where} must be a mapping, not {value!r}")
    for key in value:
        if key not in known:
            raise InvalidConfig(f"{where} has no setting {key!r}", did_you_mean(str(key), known))
    return dict(value)


def _number(delivery: Mapping[str, Any], name: str, kind: type[int] | type[float]) -> Any:
    given = delivery[name]
    try:
        number = kind(given)
    except (TypeError, ValueError):
        raise InvalidConfig(f"{name} must be a number, not {given!r}") from None
    if isinstance(given, float) and number != given:
        raise InvalidConfig(f"{name} must be a whole number, not {given!r}")
    return number


def _policy(delivery: Mapping[str, Any]) -> Policy:
    policy, backoff = Policy(), Exponential()
    values: dict[str, Any] = {}
    if "initialRetryDelay" in delivery:
        values["initial"] = delivery["initialRetryDelay"]
    if "maxRetryDelay" in delivery:
        values["cap"] = delivery["maxRetryDelay"]
    if "retryBackoffMultiplier" in delivery:
        values["multiplier"] = _number(delivery, "retryBackoffMultiplier", float)
    changed: Backoff = replace(backoff, **values)
    policy = replace(policy, backoff=changed)
    if "maxRetries" in delivery:
        policy = replace(policy, max_attempts=_number(delivery, "maxRetries", int))
    if "visibilityTimeout" in delivery:
        seconds(delivery["visibilityTimeout"])
        policy = replace(policy, visibility_timeout=delivery["visibilityTimeout"])
    return policy
