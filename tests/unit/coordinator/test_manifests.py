"""Manifests: what an epoch leaves, what a new generation starts with, and what keeps a job from starting with it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.unit.coordinator.rows import NOW, PLAN, epoch_row, job_row, model

from millstream_coordinator.compatibility import differences, repeats_effects
from millstream_coordinator.manifests import compose, restored_splits
from millstream_schema.connectors import Committable, Handle, SinkCapability
from millstream_schema.errors import SnapshotUnreadable
from millstream_schema.manifest import EpochManifest, SplitState, SubtaskSnapshot, open_manifest, seal
from millstream_schema.model import Guarantee, OperatorSpec, StreamModel
from millstream_schema.plan import compile_plan


def split(name: str, cursor: Any = None, finished: bool = False, operator: str = "in") -> SplitState:
    return SplitState(operator, name, {"path": name}, cursor, finished)


def snapshot(subtask: str, *splits: SplitState, **changes: Any) -> SubtaskSnapshot:
    vertex = subtask.partition(":")[0]
    return SubtaskSnapshot(subtask, PLAN.vertex(vertex).operators, [Handle(f"k/{subtask}", 3, "c")], list(splits), **changes)


def composed(snapshots: list[SubtaskSnapshot], copied: list[SplitState] | None = None) -> EpochManifest:
    row = epoch_row(splits=msgspec.json.encode(copied or []).decode())
    return compose(job_row(), row, model(), PLAN, snapshots, NOW + 5)


ALL = [snapshot("count:1"), snapshot("in:1", split("s1", 7)), snapshot("count:0"), snapshot("in:0", split("s0", 3))]


def test_t04_a_readers_own_cursor_wins_over_the_copied_row() -> None:
    """The row was copied when the epoch was triggered; the reader cut later."""
    manifest = composed(ALL, [split("s0", 1), split("s1", None), split("s2", None)])
    assert [(s.split_id, s.cursor) for s in manifest.splits] == [("s0", 3), ("s1", 7), ("s2", None)]


def test_a_manifest_holds_everything_a_restore_needs() -> None:
    """Fence, fingerprints, requirements, operators, snapshots in plan order, times; the same in whatever order acknowledgements came."""
    manifest = composed(ALL)
    assert (manifest.epoch, manifest.generation, manifest.term, manifest.shard_count) == (7, 3, 2, 128)
    assert (manifest.model_fingerprint, manifest.plan_fingerprint) == (PLAN.model_fingerprint, "f")
    assert [s.subtask for s in manifest.subtasks] == ["count:0", "count:1", "in:0", "in:1"]
    assert manifest.operators["count"] == {
        "kind": "aggregate",
        "states": {"value": {"kind": "aggregating"}},
        "parallelism": 2,
        "stateful": True,
    }
    assert [h.key for h in manifest.handles()] == ["k/count:0", "k/count:1", "k/in:0", "k/in:1"]
    assert (manifest.triggered_us, manifest.durable_us) == (NOW, NOW + 5)
    assert composed(list(reversed(ALL))) == manifest


def test_e23_t40_t90_none_and_unreadable_are_different() -> None:
    """A flipped bit, a missing field, a foreign format: an error that names the manifest, never an empty one."""
    sealed = seal(composed(ALL))
    assert open_manifest(sealed.body, sealed.checksum, "j/7") == composed(ALL)
    raw = msgspec.json.decode(sealed.body)
    for body, checksum in (
        (sealed.body.replace('"epoch":7', '"epoch":8'), sealed.checksum),
        (sealed.body[:-20], sealed.checksum),
        ("", sealed.checksum),
        ("null", sealed.checksum),
        ("[]", sealed.checksum),
        (sealed.body, "0" * 32),
        (msgspec.json.encode({**raw, "format": 99}).decode(), sealed.checksum),
    ):
        with pytest.raises(SnapshotUnreadable, match="j/7"):
            open_manifest(body, checksum, "j/7")


def test_a_manifest_of_a_newer_format_says_to_upgrade() -> None:
    """Its checksum is right, so it is not damaged."""
    newer = seal(msgspec.structs.replace(composed(ALL), format=2))
    with pytest.raises(SnapshotUnreadable, match="upgrade Millstream"):
        open_manifest(newer.body, newer.checksum, "j/7")


# -- splits of a new generation


def owners(manifest: EpochManifest | None, p: int = 2) -> dict[str, int]:
    return {s.split_id: owner for s, owner in restored_splits(compile_plan(model(p=p)), manifest)}


def test_t84_splits_follow_their_reader_and_those_of_nobody_are_unassigned() -> None:
    """Reader j's go to j mod the new parallelism; a split no reader had when it was cut goes back to be handed out."""
    manifest = composed(ALL, [split("free")])
    assert owners(manifest) == {"free": -1, "s0": 0, "s1": 1}
    assert owners(manifest, p=1) == {"free": -1, "s0": 0, "s1": 0}
    assert owners(manifest, p=5) == {"free": -1, "s0": 0, "s1": 1}
    assert owners(None) == {}


def test_a_finished_split_has_no_owner_and_stays_finished() -> None:
    """Whether a reader's snapshot holds it or only the rows do."""
    manifest = composed([snapshot("in:0", split("s0", 9, True)), *ALL[:3]], [split("old", 4, True)])
    found = {s.split_id: (s.finished, owner) for s, owner in restored_splits(PLAN, manifest)}
    assert found == {"s0": (True, -1), "s1": (False, 1), "old": (True, -1)}


def test_a_split_in_two_readers_snapshots_is_an_error() -> None:
    """It would be read twice; the message names the split and the epoch."""
    manifest = composed([*ALL[:3], snapshot("in:0", split("s1", 3))])
    with pytest.raises(SnapshotUnreadable, match=r"'s1' of 'in' .* epoch 7"):
        restored_splits(PLAN, manifest)


def test_splits_of_an_operator_that_is_gone_are_left_out() -> None:
    """A lenient restore drops them with their operator."""
    assert owners(composed(ALL, [split("x", operator="gone")])) == {"s0": 0, "s1": 1}


# -- compatibility


def changed(m: StreamModel, operator: str, **fields: Any) -> StreamModel:
    return msgspec.structs.replace(m, operators=[msgspec.structs.replace(o, **fields) if o.id == operator else o for o in m.operators])


def test_the_same_job_and_a_rescaled_one_fit() -> None:
    """Parallelism is no difference."""
    manifest = composed(ALL)
    assert differences(manifest, model(), model(), {}) == []
    assert differences(manifest, model(), model(p=5), {}) == []


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (changed(model(), "count", id="total"), "'count' (aggregate) keeps state and is gone"),
        (changed(model(), "in", id="input"), "'in' (source) keeps state and is gone"),
        (changed(model(), "out", id="output"), "'out' (sink) keeps state and is gone"),
        (changed(model(), "count", kind="reduce"), "'count' was a aggregate and is a reduce"),
        (changed(model(), "count", functions={"key": "m:other"}), "key function was m:key and is m:other"),
        (changed(model(), "count", states={}), "state 'value' is gone"),
        (changed(model(), "count", states={"value": {"kind": "list"}}), "state 'value' was"),
        (changed(model(), "out", capability=SinkCapability.UPSERT_BY_KEY.value), "protocol was TWO_PHASE_COMMIT and is UPSERT_BY_KEY"),
        (msgspec.structs.replace(model(), shard_count=64), "shard_count was 128 and is 64"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_t85_t89_what_differs_is_named(new: StreamModel, said: str) -> None:
    """A removed operator, another key, another state schema, another shard count, another protocol: refused, with the difference."""
    found = differences(composed(ALL), model(), new, {})
    assert any(said in d for d in found), found


def test_changed_windows_are_a_difference_and_added_state_is_none() -> None:
    """Open windows of another size cannot go on; a new state starts empty."""
    window = OperatorSpec(
        "w", "tumbling_window", True, {"size": 10, "time": "processing"}, {"key": "m:key"}, {"windows": {"kind": "window"}}
    )
    old = msgspec.structs.replace(model(), operators=[*model().operators, window])
    wider = changed(old, "w", config={"size": 20, "time": "processing"})
    assert any("window settings" in d for d in differences(composed(ALL), old, wider, {}))
    assert differences(composed(ALL), old, changed(old, "w", states={**window.states, "extra": {"kind": "value"}}), {}) == []


def test_everything_that_differs_is_listed_at_once() -> None:
    """One refusal names all."""
    new = msgspec.structs.replace(changed(changed(model(), "count", id="total"), "in", id="input"), shard_count=64)
    assert len(differences(composed(ALL), model(), new, {})) >= 3


def test_t03_a_rename_by_mapping_is_no_difference() -> None:
    """An operator without a mapping is gone; with one it is the same; a mapping of nobody is an error."""
    new = changed(model(), "count", id="total")
    assert differences(composed(ALL), model(), new, {"count": "total"}) == []
    assert differences(composed(ALL), model(), model(), {"cuont": "count"}) != []


def test_a_stateless_operator_may_come_and_go() -> None:
    """It keeps nothing that could be lost."""
    extra = msgspec.structs.replace(model(), operators=[*model().operators, OperatorSpec("m", "map", False)])
    assert differences(composed(ALL), extra, model(), {}) == differences(composed(ALL), model(), extra, {}) == []


@pytest.mark.parametrize(("epoch", "refused"), [(6, False), (7, False), (8, True)])
def test_an_epoch_older_than_what_is_committed_is_refused_under_strict(epoch: int, refused: bool) -> None:
    """Restoring it would repeat effects; the message says how to insist."""
    why = repeats_effects(composed(ALL), epoch, Guarantee.STRICT_EXACTLY_ONCE)
    assert (why is not None and "--repeat-effects" in why) is refused
    assert repeats_effects(composed(ALL), epoch, Guarantee.EFFECTIVELY_ONCE) is None


def test_committables_of_all_subtasks_are_found() -> None:
    """From an epoch one reaches every committable."""
    one = Committable("job-1:out:0:7", "out", 0, 7, 1, "c")
    assert composed([snapshot("count:0", committables=[one]), *ALL]).committables() == [one]
