"""Whole numbers that do not travel: rows, pipes and messages carry 64 bits. Pure.

Called by the operations that submit and resume. What must never happen here: a wider number accepted, with which no subtask could be started.
"""

from __future__ import annotations

from collections.abc import Mapping

from millstream_schema.connectors import Json
from millstream_schema.model import Override, StreamModel

LOWEST, HIGHEST = -(1 << 63), (1 << 64) - 1


def too_wide(what: str, value: object) -> list[str]:
    """One sentence for each whole number in ``value`` that is outside 64 bits; ``what`` names the value."""
    if isinstance(value, Mapping):
        return [p for key, part in value.items() for p in too_wide(f"{what}.{key}", part)]
    if isinstance(value, list | tuple):
        return [p for i, part in enumerate(value) for p in too_wide(f"{what}[{i}]", part)]
    if isinstance(value, int) and not LOWEST <= value <= HIGHEST:
        return [f"{what} is a whole number of {value.bit_length()} bits: give one from -2**63 to 2**64-1, or a text"]
    return []


def wide_numbers(config: Mapping[str, Json], overrides: Mapping[str, Override], model: StreamModel) -> list[str]:
    """Of all that travels with a job: its config, its overrides, and what the pipeline gave its operators and edges."""
    found = too_wide("config", config)
    for name, override in overrides.items():
        found += too_wide(f"override {name}.parallelism", override.parallelism) + too_wide(f"override {name}", override.edge or {})
    for op in model.operators:
        found += too_wide(f"operator {op.id!r}: config", op.config) + too_wide(f"operator {op.id!r}: states", op.states)
    for edge in model.edges:
        for field in edge.config.__struct_fields__:
            found += too_wide(f"edge {edge.id!r}: {field}", getattr(edge.config, field))
    return found


__all__ = ["too_wide", "wide_numbers"]
