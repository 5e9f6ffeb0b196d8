"""From the texts of a command line to values: config, settings, overrides, renames. Called by the CLI; every error says what to write instead."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from millstream_schema.connectors import Json
from millstream_schema.errors import ConfigurationError, MillstreamError
from millstream_schema.model import EdgeConfig, Override
from millstream_schema.pipeline import FactoryRegistry
from millstream_schema.settings import RestartPolicy, StreamSettings
from millstream_tasks.subtask_main import load_registry


def pipelines_of(target: str | None) -> FactoryRegistry:
    """The registry of ``module:attribute``, looked for in the current directory too. Raises ConfigurationError."""
    if not target:
        raise ConfigurationError("a pipeline has to be built here: give --pipelines module:attribute, or set MILLSTREAM_PIPELINES")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return load_registry(target)
    except MillstreamError:
        raise
    except Exception as exc:  # the user's own module
        raise ConfigurationError(f"pipelines {target!r} cannot be loaded: {type(exc).__name__}: {exc}; --debug shows where") from exc


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
            raise ConfigurationError(f"{origin} cannot be read: {exc.strerror}") from None
    advice = """write an object, e.g. --config '{"path": "in.csv"}', or --config @file.json"""
    try:
        value = json.loads(source)
    except ValueError as exc:
        raise ConfigurationError(f"{origin} is not JSON: {exc}; {advice}") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{origin} is a JSON {type(value).__name__}, not an object; {advice}")
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
            tree.setdefault(head, {})[field] = value
        else:
            tree[head] = value
    try:
        return msgspec.convert(tree, StreamSettings, strict=False)
    except msgspec.ValidationError as exc:
        raise ConfigurationError(f"--setting has a wrong value: {exc}") from None


def overrides_of(texts: Iterable[str]) -> dict[str, Override]:
    """``operator.parallelism=3``, or ``operator.capacity=16`` for a field of the edges that end there."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in pairs("--override", texts).items():
        operator, dot, field = key.rpartition(".")
        if not dot or (field != "parallelism" and field not in EdgeConfig.__struct_fields__):
            known = ", ".join(["parallelism", *EdgeConfig.__struct_fields__])
            raise ConfigurationError(f"--override {key!r}: write operator.field=value; fields: {known}")
        found.setdefault(operator, {})[field] = value
    try:
        return {operator: _override(fields) for operator, fields in found.items()}
    except msgspec.ValidationError as exc:
        raise ConfigurationError(f"--override has a wrong value: {exc}") from None


def _override(fields: Mapping[str, Any]) -> Override:
    parallelism = fields.get("parallelism")
    edge = {k: v for k, v in fields.items() if k != "parallelism"}
    checked = msgspec.to_builtins(msgspec.convert(edge, EdgeConfig, strict=False))
    return Override(
        None if parallelism is None else msgspec.convert(parallelism, int, strict=False),
        {k: checked[k] for k in edge} or None,
    )


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
