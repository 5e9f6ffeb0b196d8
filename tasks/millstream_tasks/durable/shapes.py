"""A handler's parameters as data, and checks made from that data: JSON Schema by pydantic, with what JSON Schema cannot say in ``x-`` keywords.

Called when a worker tells of its handlers, and by clients that submit by name without the code. The checks are pydantic's own on rebuilt types, so that a value given by name is
stored exactly as if it were given by object. What must never happen here: code that runs because data named it; a rebuilt type that stores another value than the original. What is
not known for certain to be rebuilt alike (validators, serialisers, custom types) is marked, taken as given, and checked when the task runs.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal, Union
from uuid import UUID

import pydantic
from pydantic.json_schema import GenerateJsonSchema

from millstream_schema.durable.requests import decode_arguments, encode_arguments
from millstream_schema.errors import TaskInvalid

OPAQUE = "x-opaque"
KIND = "x-python"
KEYS = "x-keys"
DEFAULT = "x-default"
STRICT = "x-strict"
ZONE = "x-zone"
Check = Callable[[Any], Any]
"""From a given value to the plain one that is stored. Raises pydantic.ValidationError."""

_BOUNDS = frozenset({"gt", "ge", "lt", "le", "multiple_of", "strict"})
_LENGTHS = frozenset({"min_length", "max_length", "strict"})
_ALWAYS = frozenset({"type", "metadata", "ref", "generic_origin"})
_KNOWN: Mapping[str, frozenset[str]] = {
    "int": _BOUNDS,
    "float": _BOUNDS,
    "str": _LENGTHS | {"pattern"},
    "bytes": _LENGTHS,
    "bool": frozenset({"strict"}),
    "none": frozenset(),
    "any": frozenset(),
    "decimal": frozenset({"strict"}),
    "datetime": frozenset({"microseconds_precision", "strict", "tz_constraint"}),
    "date": frozenset({"strict"}),
    "time": frozenset({"microseconds_precision", "strict"}),
    "timedelta": frozenset({"microseconds_precision", "strict"}),
    "uuid": frozenset({"strict"}),
    "literal": frozenset({"expected"}),
    "list": _LENGTHS | {"items_schema"},
    "set": _LENGTHS | {"items_schema"},
    "frozenset": _LENGTHS | {"items_schema"},
    "tuple": frozenset({"items_schema", "variadic_item_index", "strict"}),
    "dict": _LENGTHS | {"keys_schema", "values_schema"},
    "nullable": frozenset({"schema"}),
    "union": frozenset({"choices"}),
    "default": frozenset({"schema", "default"}),
    "model": frozenset({"cls", "config", "custom_init", "root_model", "schema"}),
    "model-fields": frozenset({"fields", "model_name", "computed_fields", "extra_behavior"}),
    "model-field": frozenset({"schema"}),
    "dataclass": frozenset({"cls", "config", "fields", "frozen", "slots", "post_init", "schema"}),
    "dataclass-args": frozenset({"dataclass_name", "fields", "computed_fields", "collect_init_only"}),
    "dataclass-field": frozenset({"name", "schema", "kw_only", "init"}),
    "definitions": frozenset({"schema", "definitions"}),
    "definition-ref": frozenset({"schema_ref"}),
}
"""Kinds of pydantic's core schemas that are rebuilt alike, with the settings that the JSON Schema shows. Anything else makes its place opaque."""
_WRAPPERS = frozenset({"default", "model", "model-field", "dataclass", "dataclass-field", "definitions", "definition-ref"})
_SCALARS: Mapping[str, Any] = {
    "int": int, "float": float, "str": str, "bytes": bytes, "bool": bool, "none": None, "decimal": Decimal, "datetime": datetime, "date": date, "time": time,
    "timedelta": timedelta, "uuid": UUID,
}  # fmt: skip
_ZONES: Mapping[str, Any] = {"aware": pydantic.AwareDatetime, "naive": pydantic.NaiveDatetime}
_CONTAINERS: Mapping[str, Any] = {"list": list, "set": set, "frozenset": frozenset}
_KEYWORDS = {
    "exclusiveMinimum": "gt", "minimum": "ge", "exclusiveMaximum": "lt", "maximum": "le", "multipleOf": "multiple_of", "pattern": "pattern", STRICT: "strict",
    "minLength": "min_length", "maxLength": "max_length", "minItems": "min_length", "maxItems": "max_length", "minProperties": "min_length",
    "maxProperties": "max_length",
}  # fmt: skip


class _Describing(GenerateJsonSchema):
    """pydantic's generator, whose every node says which Python type it stands for; what cannot be said is opaque."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}

    def generate_inner(self, schema: Any) -> dict[str, Any]:
        made = dict(super().generate_inner(schema))
        kind = schema["type"]
        if kind not in _KNOWN or set(schema) - _KNOWN[kind] - _ALWAYS or not _plain(schema):
            return {**made, OPAQUE: True}
        if kind not in _WRAPPERS:
            made[KIND] = kind
        if schema.get("strict"):
            made[STRICT] = True
        if schema.get("tz_constraint"):
            made[ZONE] = schema["tz_constraint"]
        if kind == "dict":
            made[KEYS] = self.generate_inner(schema.get("keys_schema", {"type": "any"}))
        if kind == "default":
            made[DEFAULT] = encode_arguments((schema["default"],), {})
        return made

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> dict[str, Any]:
        return {OPAQUE: True}


def _plain(schema: Mapping[str, Any]) -> bool:
    """Whether nothing the JSON Schema does not show has a say in which value is stored."""
    kind = schema["type"]
    if kind == "literal":
        return all(type(v) in (str, int, bool, type(None)) for v in schema["expected"])
    if kind == "tuple":
        return "variadic_item_index" not in schema or (len(schema["items_schema"]) == 1 and schema["variadic_item_index"] == 0)
    if kind == "datetime":
        return schema.get("tz_constraint") in (None, *_ZONES)
    if kind == "default":
        return "default" in schema and _storable(schema["default"])
    if kind in ("model", "dataclass"):
        return not (
            set(schema.get("config", {})) - {"title", "hide_input_in_errors", "extra_fields_behavior"}
            or schema.get("custom_init")
            or schema.get("post_init")
        )
    if kind in ("model-fields", "dataclass-args"):
        fields = schema["fields"].values() if kind == "model-fields" else schema["fields"]
        inner = [f["schema"] for f in fields]
        return not schema.get("computed_fields") and all(s["type"] != "default" or _plain(s) for s in inner)
    if kind == "dataclass-field":
        return bool(schema.get("init", True))
    return True


def _storable(value: Any) -> bool:
    try:
        encode_arguments((value,), {})
    except TaskInvalid:
        return False
    return True


def described(adapter: pydantic.TypeAdapter[Any]) -> dict[str, Any]:
    """The JSON Schema of what an annotation takes."""
    try:
        return adapter.json_schema(schema_generator=_Describing)
    except pydantic.errors.PydanticUserError:
        return {OPAQUE: True}


def check_of(schema: Mapping[str, Any]) -> Check | None:
    """The check that a described annotation stands for; None: anything is taken as it is."""
    kind = _annotation(schema, schema.get("$defs", {}), ())
    if kind is Any:
        return None
    adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(kind, config=None if _model(kind) else _CONFIG)
    return lambda value: adapter.dump_python(adapter.validate_python(value), by_alias=True)


_CONFIG = pydantic.ConfigDict(hide_input_in_errors=True)


def _model(kind: Any) -> bool:
    return isinstance(kind, type) and not isinstance(kind, types.GenericAlias) and issubclass(kind, pydantic.BaseModel)


def _annotation(node: Mapping[str, Any], defs: Mapping[str, Any], within: tuple[str, ...]) -> Any:
    """A type that takes and gives the same values as the one described. ``within``: definitions it is part of; a recursive one is taken as given from there on."""
    if node.get(OPAQUE):
        return Any
    if "$ref" in node:
        name = str(node["$ref"]).rpartition("/")[2]
        return Any if name in within else _annotation(defs[name], defs, (*within, name))
    inner: Callable[[Mapping[str, Any]], Any] = lambda n: _annotation(n, defs, within)  # noqa: E731
    kind = node.get(KIND, "none" if node.get("type") == "null" else "any")
    made: Any = Any
    if kind in _SCALARS:
        made = _ZONES[node[ZONE]] if ZONE in node else _SCALARS[kind]
    elif kind in _CONTAINERS:
        made = _CONTAINERS[kind][inner(node.get("items", {}))]
    elif kind == "tuple":
        made = tuple[tuple(inner(n) for n in node["prefixItems"])] if "prefixItems" in node else _tuple(node, inner)  # type: ignore[misc]
    elif kind == "dict":
        values = node.get("additionalProperties", {})
        made = dict[inner(node[KEYS]), inner(values if isinstance(values, Mapping) else {})]  # type: ignore[misc]
    elif kind == "literal":
        made = Literal[tuple(node["enum"] if "enum" in node else [node["const"]])]
    elif kind in ("union", "nullable"):
        made = Union[tuple(inner(n) for n in node["anyOf"])]  # noqa: UP007
    elif kind in ("model-fields", "dataclass-args"):
        made = _fields(node, inner)
    limits = {ours: node[theirs] for theirs, ours in _KEYWORDS.items() if theirs in node}
    return Annotated[made, pydantic.Field(**limits)] if limits and kind != "tuple" else made


def _tuple(node: Mapping[str, Any], inner: Callable[[Mapping[str, Any]], Any]) -> Any:
    return tuple[()] if node.get("maxItems") == 0 else tuple[inner(node.get("items", {})), ...]  # type: ignore[misc]


def _fields(node: Mapping[str, Any], inner: Callable[[Mapping[str, Any]], Any]) -> Any:
    """A model of the same fields. Their names are aliases: a field of the user's may be named like something a model has."""
    fields: dict[str, Any] = {}
    for at, (name, field) in enumerate(node.get("properties", {}).items()):
        default = decode_arguments(field[DEFAULT])[0][0] if DEFAULT in field else ...
        fields[f"f{at}"] = (inner(field), pydantic.Field(default, alias=name))
    extra: Literal["forbid", "allow", "ignore"] = {False: "forbid", True: "allow"}.get(node.get("additionalProperties"), "ignore")  # type: ignore[arg-type,assignment]
    config = pydantic.ConfigDict(extra=extra, hide_input_in_errors=True)
    return pydantic.create_model(str(node.get("title", "fields")), __config__=config, **fields)
