"""From the texts of a command line to values: config, settings, overrides, renames. Called by the CLI; every error says what to write instead."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from millstream_schema import settings
from millstream_schema.connectors import Json
from millstream_schema.errors import ConfigurationError
from millstream_schema.model import EdgeConfig, Override
from millstream_schema.pipeline import FactoryRegistry
from millstream_schema.settings import RestartPolicy, StreamSettings
from millstream_tasks.durable.handlers import HandlerRegistry
from millstream_tasks.subtask_main import load_registry
from millstream_tasks.task_main import load_handlers

from .kept import celery_application

UNITS = settings.UNITS | {
    "capacity": "envelopes",
    "batch_records": "records",
    "batch_bytes": "bytes",
}
"""Units of whole numbers; names that end in ``_ms`` are milliseconds. As in the reference of settings."""
_FROM_ZERO = {"epoch_interval_ms", "min_pause_ms", "linger_ms", "delay_ms", "max_delay_ms", "interval_ms", "failures", "stalls"}
_JSON_KINDS = {"list": "array", "str": "string", "NoneType": "null", "bool": "boolean", "int": "number", "float": "number"}


def _here() -> None:
    """Modules are looked for in the current directory, too, as ``celery -A`` does: a console script's own is where it is installed."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)


def pipelines_of(target: str | None) -> FactoryRegistry:
    """The Pipelines object of ``module:attribute``. Raises ConfigurationError."""
    if not target:
        raise ConfigurationError("a pipeline has to be built here: give --pipelines module:attribute, or set MILLSTREAM_PIPELINES")
    _here()
    return load_registry(target)


def handlers_of(target: str) -> HandlerRegistry:
    """The Handlers object of ``module:attribute``. Raises ConfigurationError."""
    _here()
    return load_handlers(target)


def celery_of(target: str) -> Any:
    """The Celery application of ``module:attribute``. Raises ConfigurationError."""
    _here()
    return celery_application(target)


def config_of(text: str | None) -> dict[str, Json] | None:
    """A JSON object, or ``@file`` that holds one."""
    if text is None:
        return None
    source, origin = text, "--config"
    if text.startswith("@"):
        origin = f"--config {text}"
        try:
            source = Path(text[1:]).read_text()
        except OSError as exc:
            raise ConfigurationError(f"{origin}: the file {Path(text[1:]).absolute()} cannot be read: {exc.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigurationError(f"{origin}: the file is not UTF-8 text") from None
    advice = """write an object, e.g. --config '{"path": "in.csv"}', or --config @file.json"""
    try:
        value = json.loads(source)
    except ValueError as exc:
        if origin == "--config" and Path(text).is_file():
            raise ConfigurationError(f"--config {text} names a file: write --config @{text} to have it read") from None
        raise ConfigurationError(f"{origin} is not JSON: {exc}; {advice}") from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ConfigurationError(f"{origin} is a JSON {_JSON_KINDS.get(kind, kind)}, not an object with the pipeline's keys; {advice}")
    return value


def settings_of(texts: Iterable[str]) -> StreamSettings:
    """``epoch_interval_ms=500``, ``restart.failures=5`` …"""
    tree: dict[str, Any] = {}
    known = {*StreamSettings.__struct_fields__, *(f"restart.{f}" for f in RestartPolicy.__struct_fields__)} - {"restart"}
    for key, value in pairs("--setting", texts).items():
        if key not in known:
            raise ConfigurationError(f"there is no setting {key!r}; known: {', '.join(sorted(known))}")
        head, _, field = key.partition(".")
        if field:
            tree.setdefault(head, {})[field] = _typed(f"--setting {key}", field, value, RestartPolicy)
        else:
            tree[head] = _typed(f"--setting {key}", head, value, StreamSettings)
    return msgspec.convert(tree, StreamSettings)


def overrides_of(texts: Iterable[str]) -> dict[str, Override]:
    """``operator.parallelism=3``, or ``operator.capacity=16`` for a field of the edges that end there."""
    found: dict[str, tuple[list[int], dict[str, Json]]] = {}
    for key, value in pairs("--override", texts).items():
        operator, dot, field = key.rpartition(".")
        if not dot or (field != "parallelism" and field not in EdgeConfig.__struct_fields__):
            known = ", ".join(["parallelism", *EdgeConfig.__struct_fields__])
            raise ConfigurationError(f"--override {key!r}: write operator.field=value; fields: {known}")
        parallelism, edge = found.setdefault(operator, ([], {}))
        if field == "parallelism":
            parallelism.append(_typed(f"--override {key}", field, value, Override))
        else:
            edge[field] = _typed(f"--override {key}", field, value, EdgeConfig)
    return {operator: Override(parallelism[0] if parallelism else None, edge or None) for operator, (parallelism, edge) in found.items()}


def _typed(option: str, field: str, text: str, of: type[msgspec.Struct]) -> Any:
    """The text as a value of that field's type, as JSON has it. Raises ConfigurationError with setting, value, unit and what is allowed."""
    hint = get_type_hints(of)[field]
    try:
        return msgspec.to_builtins(msgspec.convert(text, hint, strict=False))
    except msgspec.ValidationError:
        raise ConfigurationError(f"{option} is {text!r}: write {_allowed(field, hint)}") from None


def _allowed(field: str, hint: Any) -> str:
    kinds = [k for k in get_args(hint) or (hint,) if k is not type(None)]
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if kinds == [bool]:
        return "true or false"
    if kinds == [int]:
        unit = "milliseconds" if field.endswith("_ms") else UNITS.get(field, "subtasks")
        return f"a whole number of {unit}, {'0 or more' if field in _FROM_ZERO else 'at least 1'}"
    values = [str(value) for kind in kinds for value in (get_args(kind) or kind)]
    return " or ".join([*values, "null"] if type(None) in get_args(hint) else values)


def pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    """``key=value`` each. Raises ConfigurationError for a text without ``=`` or a key given twice."""
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigurationError(f"{option} {text!r}: write key=value")
        if key in found:
            raise ConfigurationError(f"{option} {key!r} is given twice")
        found[key] = value
    return found
