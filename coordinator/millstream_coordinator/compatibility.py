"""Whether a job may be started from a manifest: everything that differs, one sentence each. Pure.

Called by the operations that submit and resume. What must never happen here: a difference that would drop state or output and is not named.
"""

from __future__ import annotations

from collections.abc import Mapping

from millstream_schema.manifest import EpochManifest
from millstream_schema.model import Guarantee, StreamModel
from millstream_schema.plan import STATEFUL


def differences(manifest: EpochManifest, old: StreamModel, new: StreamModel, renames: Mapping[str, str], committed: int = 0) -> list[str]:
    """What keeps ``new`` from restoring the manifest ``old`` left. ``renames``: old operator id → new one; ``committed``: the epoch up to which output is committed for sure.

    A refusal under STRICT restore; under LENIENT the list says what is dropped.
    """
    found = []
    if manifest.shard_count != new.shard_count:
        found.append(f"shard_count was {manifest.shard_count} and is {new.shard_count}: keyed state cannot be redistributed")
    ids = {op.id: op for op in new.operators}
    held = _held(manifest, committed)
    found += [f"sink {o!r} cannot be renamed while it has uncommitted output: commit first" for o in sorted(held) if renames.get(o, o) != o]
    found += [f"rename of {o!r}: the snapshot has no such operator" for o in renames if o not in {op.id for op in old.operators}]
    for op in old.operators:
        name = renames.get(op.id, op.id)
        now = ids.get(name)
        keeps = op.kind in STATEFUL or op.kind in ("source", "sink")
        if now is None:
            if keeps:
                found.append(
                    f"operator {op.id!r} ({op.kind}) keeps state and is gone: map its new uid by renames, or restore leniently to drop it"
                )
            continue
        if now.kind != op.kind and keeps:
            found.append(f"operator {name!r} was a {op.kind} and is a {now.kind}")
        elif op.kind in STATEFUL:
            found += _state_differences(name, op.states, now.states)
            if op.functions.get("key") != now.functions.get("key"):
                found.append(f"operator {name!r}: its key function was {op.functions.get('key')} and is {now.functions.get('key')}")
            if op.config != now.config and op.kind.endswith("window"):
                found.append(f"operator {name!r}: its window settings have changed from {op.config} to {now.config}")
        if op.kind == "sink" and op.capability != now.capability:
            found.append(f"sink {name!r}: its protocol was {op.capability} and is {now.capability}")
        elif op.kind == "sink" and op.id in held and op.config != now.config:
            changed = ", ".join(k for k in sorted({*op.config, *now.config}) if op.config.get(k) != now.config.get(k))
            found.append(
                f"sink {name!r} has uncommitted output and its {changed} has changed: that output lies at the old target. Finish it first with "
                "`millstream jobs commit` of the job it belongs to; if it is the same target in other words, restore leniently"
            )
    return found


def _state_differences(operator: str, old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    found = [f"operator {operator!r}: state {n!r} is gone" for n in old if n not in new]
    return found + [f"operator {operator!r}: state {n!r} was {old[n]} and is {new[n]}" for n in old if n in new and old[n] != new[n]]


def _held(manifest: EpochManifest, committed: int) -> set[str]:
    """Sinks with output that is not committed for sure."""
    return {c.operator for c in manifest.committables() if c.epoch > committed}


def orphaned_output(manifest: EpochManifest, new: StreamModel, renames: Mapping[str, str], committed: int = 0) -> list[str]:
    """Sinks whose uncommitted output nobody of ``new`` would commit: refused however lenient the restore, for it would never become visible."""
    sinks = {op.id for op in new.operators if op.kind == "sink"}
    held = sorted(_held(manifest, committed))
    return [
        f"sink {o!r} has uncommitted output and is gone or renamed: finish it first with `millstream jobs commit` of the job it belongs to"
        for o in held
        if o not in sinks or renames.get(o, o) != o
    ]


def repeats_effects(manifest: EpochManifest, newest_committed: int, guarantee: Guarantee) -> str | None:
    """Why restoring would make effects visible twice, or None."""
    if guarantee is Guarantee.STRICT_EXACTLY_ONCE and manifest.epoch < newest_committed:
        return (
            f"epoch {manifest.epoch} is older than epoch {newest_committed}, whose effects are committed: "
            "restoring it would repeat them; say --repeat-effects if that is meant"
        )
    return None


__all__ = ["differences", "orphaned_output", "repeats_effects"]
