"""Requests that change properties: which are well formed, and what they make of the properties that
are set.  Pure.

The rules, their order and their codes are those of Kafka's `ConfigAdminManager` and
`ConfigurationControlManager`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from kdirect.errors import ConfigError
from kdirect.format.error_codes import ErrorCode
from kdirect.option_table import Option, Options
from kdirect.options import BROKER

TOPIC_RESOURCE = 2
BROKER_RESOURCE = 4
LOGGER_RESOURCE = 8
METRICS_RESOURCE = 16
GROUP_RESOURCE = 32
KINDS = (TOPIC_RESOURCE, BROKER_RESOURCE, LOGGER_RESOURCE, METRICS_RESOURCE, GROUP_RESOURCE)
SET, DELETE, APPEND, SUBTRACT = range(4)

Refusal = tuple[int, str]


def ill_formed(resource: Any, resources: Iterable[Any]) -> Refusal | None:
    """Why a resource of an AlterConfigs or IncrementalAlterConfigs request is not looked at
    further, whatever it is of: (code, text)."""
    where = (resource.resource_type, resource.resource_name)
    if sum((r.resource_type, r.resource_name) == where for r in resources) > 1:
        return ErrorCode.INVALID_REQUEST, "Each resource must appear at most once."
    names = Counter(c.name for c in resource.configs)
    if twice := [name for name, n in names.items() if n > 1]:
        return ErrorCode.INVALID_REQUEST, f"Error due to duplicate config keys: {twice[0]}"
    without = [c.name for c in resource.configs if c.value is None and operation_of(c) != DELETE]
    if without:
        text = f"Null value not supported for : {', '.join(without)}"
        return ErrorCode.INVALID_REQUEST, text
    for c in resource.configs:
        if operation_of(c) not in (SET, DELETE, APPEND, SUBTRACT):
            return ErrorCode.INVALID_REQUEST, f"Unknown operations type {c.config_operation}"
    return None


def operation_of(config: Any) -> int:
    """What is done with a property; AlterConfigs knows nothing but setting it."""
    return int(getattr(config, "config_operation", SET))


def changed_list(row: Option, own: str | None, value: str, operation: int) -> str:
    """The list `own`, or the default, with the elements of `value` added or removed.  Whether the
    result is allowed is checked later."""
    default = BROKER.find(row.synonym).default if row.synonym else row.default
    before = (default if own is None else row.parse(own)) or []
    given = [x.strip() for x in value.split(",") if x.strip()]
    if operation == APPEND:
        return ",".join([*before, *(x for x in given if x not in before)])
    return ",".join(x for x in before if x not in given)


def changed(own: Mapping[str, str], resource: Any, table: Options) -> dict[str, str]:
    """The properties `own` of a resource after the operations of an IncrementalAlterConfigs
    request.  ConfigError for an unknown property, or a list's operation on what is none."""
    configs = dict(own)
    for c in resource.configs:
        operation = operation_of(c)
        if operation == DELETE and not table.knows(c.name):
            continue  # what was never set can be deleted
        row = table.find(c.name)
        if operation == DELETE:
            configs.pop(row.name, None)
        elif operation == SET:
            configs[row.name] = c.value
        elif row.kind == "list":
            configs[row.name] = changed_list(row, configs.get(row.name), c.value, operation)
        else:
            raise ConfigError(
                f"config {c.name} is no list",
                hint="set it instead of appending or subtracting",
            )
    return configs
