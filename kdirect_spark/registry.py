"""A schema registry: where the schemas of values are looked up, and how values name them.

Owns: `RegistrySettings`; `registry`, the client of this process; `schema_id`, which reads
Confluent's frame of a value (one byte 0, then the id of its schema in four bytes).

Law: confluent_kafka is imported here only, at first use: Spark forks its workers, so a client
belongs to one process.  What a schema's id or version stands for never changes, so it is asked for
once.  Neither messages nor logs have credentials.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from kdirect.errors import (
    ConfigError,
    MissingPackageError,
    SchemaRegistryError,
    UnknownSchemaError,
)

FRAME = 5  # bytes
NO_FRAME = "the value does not begin with Confluent's frame: a byte 0 and a schema's id"
UNKNOWN_S = 30.0  # for which an id that the registry does not know is not asked for again
RETRIES = 2
_UNKNOWN = (40401, 40402, 40403)  # a subject, a version, an id
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySettings:
    """How the registry at `url` is reached.  `user_info` is user:password."""

    url: str
    subject: str | None = None
    timeout_ms: int = 10_000
    ca_location: str | None = None
    user_info: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"option schema.registry.url: {_without_user(self.url)!r} is no address of a "
                "registry",
                hint="write for example http://registry.example:8081",
            )
        if "@" in self.url.partition("://")[2].partition("/")[0]:
            raise ConfigError(
                "option schema.registry.url has credentials, which Spark's plans would show",
                hint="write schema.registry.secret.basic.auth.user.info=USER:PASSWORD, which Spark "
                "hides",
            )
        if self.user_info is not None and ":" not in self.user_info:
            raise ConfigError(
                "option schema.registry.secret.basic.auth.user.info has no colon",
                hint="write USER:PASSWORD",
            )
        if self.user_info is not None and self.token is not None:
            raise ConfigError(
                "options schema.registry.secret.basic.auth.user.info and "
                "schema.registry.secret.bearer.auth.token exclude each other",
                hint="remove one",
            )


class Written(NamedTuple):
    """A schema as the registry has it.  `references`: the schemas that it names, those first that
    others need, each with the name by which it is imported."""

    text: str
    kind: str  # AVRO, PROTOBUF or JSON
    references: tuple[tuple[str, str], ...] = ()


class Registry:
    """A client of one process, for any of its threads."""

    def __init__(self, settings: RegistrySettings) -> None:
        self.settings = settings
        conf: dict[str, Any] = {
            "url": settings.url,
            "timeout": settings.timeout_ms / 1000,
            "max.retries": RETRIES,
            "retries.wait.ms": 200,
            "retries.max.wait.ms": 1000,
        }
        if settings.user_info is not None:
            conf["basic.auth.user.info"] = settings.user_info
        if settings.token is not None:
            conf["bearer.auth.credentials.source"] = "STATIC_TOKEN"
            conf["bearer.auth.token"] = settings.token
            # What Confluent's cloud needs; others ignore it.
            conf["bearer.auth.logical.cluster"] = conf["bearer.auth.identity.pool.id"] = ""
        if settings.ca_location is not None:
            conf["ssl.ca.location"] = settings.ca_location
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient
        except ImportError as e:
            raise MissingPackageError(
                f"schema.registry.url needs the client of confluent-kafka ({e})",
                hint="pip install 'kdirect[registry]' where the driver and the executors run",
            ) from e
        try:
            self._client = SchemaRegistryClient(conf)
        except (OSError, ValueError) as e:  # certificates that cannot be read
            raise ConfigError(
                f"schema registry {settings.url}: the client refuses its options "
                f"({type(e).__name__}: {e})",
                hint="see schema.registry.url and schema.registry.ssl.ca.location",
            ) from None
        self._found: dict[tuple[int, str | None], Written] = {}
        self._unknown: dict[int, float] = {}

    def by_id(self, number: int, form: str | None = None) -> Written:
        """The schema of an id; `form` is as the registry's API has it, for example `serialized`.
        Raises UnknownSchemaError, SchemaRegistryError."""
        found = self._found.get((number, form))
        if found is not None:
            return found
        if time.monotonic() < self._unknown.get(number, 0.0):
            raise self._unknown_id(number)
        try:
            schema = self._ask(
                f"the schema of id {number}", lambda: self._client.get_schema(number, fmt=form)
            )
        except UnknownSchemaError:
            self._unknown[number] = time.monotonic() + UNKNOWN_S
            raise self._unknown_id(number) from None
        self._found[number, form] = found = self._written(schema, form)
        return found

    def versions(self, subject: str) -> list[int]:
        """The versions of a subject.  Raises ConfigError if there is none."""
        try:
            found: list[int] = self._ask(
                f"the versions of subject {subject}", lambda: self._client.get_versions(subject)
            )
        except UnknownSchemaError:
            raise ConfigError(
                f"the schema registry {self.settings.url} has no subject {subject}",
                hint="name it with schema.registry.subject, or give the schema with an option",
            ) from None
        return sorted(found)

    def version(self, subject: str, version: int, form: str | None = None) -> Written:
        """A version of a subject.  Raises SchemaRegistryError."""
        return self._written(self._version(subject, version, form).schema, form)

    def _version(self, subject: str, version: int, form: str | None) -> Any:
        what = f"version {version} of subject {subject}"
        try:
            return self._ask(what, lambda: self._client.get_version(subject, version, fmt=form))
        except UnknownSchemaError:
            raise self._error(f"it does not have {what}") from None

    def _written(self, schema: Any, form: str | None) -> Written:
        references: dict[str, str] = {}

        def add(of: Any, depth: int) -> None:
            for reference in of.references or ():
                if reference.name in references:
                    continue
                if depth > 32:
                    raise self._error(f"the references of {reference.subject} have no end")
                found = self._version(reference.subject, reference.version, form)
                add(found.schema, depth + 1)
                references[reference.name] = found.schema.schema_str or ""

        add(schema, 0)
        return Written(
            schema.schema_str or "", schema.schema_type or "AVRO", tuple(references.items())
        )

    def _ask(self, what: str, ask: Callable[[], _Answer]) -> _Answer:
        from confluent_kafka.schema_registry.error import SchemaRegistryError as Refused

        try:
            return ask()
        except Refused as e:
            if e.http_status_code == 404 and e.error_code in _UNKNOWN:
                raise UnknownSchemaError(f"the registry does not have {what}") from None
            if e.http_status_code in (401, 403):
                raise self._error(
                    f"it refuses {what}: HTTP status {e.http_status_code}",
                    "give schema.registry.secret.basic.auth.user.info or another user's",
                ) from None
            said = f"HTTP status {e.http_status_code}, {e.error_message}"
            raise self._error(f"it does not give {what}: {said}") from None
        except (OSError, TypeError, ValueError, KeyError, AttributeError) as e:
            # No registry answers so.
            raise self._error(f"it does not give {what}: {type(e).__name__}: {e}") from None
        except Exception as e:  # httpx has errors of many kinds
            raise self._error(f"it cannot be asked for {what}: {type(e).__name__}: {e}") from None

    def _unknown_id(self, number: int) -> UnknownSchemaError:
        return UnknownSchemaError(f"the registry knows no schema of id {number}")

    def _error(self, why: str, hint: str = "") -> SchemaRegistryError:
        return SchemaRegistryError(
            f"schema registry {self.settings.url}: {why}",
            hint=hint or "see schema.registry.url, and whether the registry runs",
        )


_clients: dict[RegistrySettings, Registry] = {}
_pid = 0
_lock = threading.Lock()


def registry(settings: RegistrySettings) -> Registry:
    """The client of this process."""
    global _pid
    with _lock:
        if _pid != os.getpid():
            _clients.clear()
            _pid = os.getpid()
        if settings not in _clients:
            _clients[settings] = Registry(settings)
        return _clients[settings]


def schema_id(value: bytes) -> int | None:
    """The id in Confluent's frame; None where a value has no frame."""
    if len(value) < FRAME or value[0] != 0:
        return None
    return int.from_bytes(value[1:FRAME], "big")


def _without_user(url: str) -> str:
    return url.rpartition("@")[2]
