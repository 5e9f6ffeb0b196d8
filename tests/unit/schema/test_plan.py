"""The planner: what is refused, what is fused, and that nothing depends on the process that plans."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.sources import ROOT

from millstream_schema.canonical import owner_of, shard_of
from millstream_schema.connectors import SinkCapability, SourceCapability
from millstream_schema.errors import JobInvalid
from millstream_schema.model import (
    Component,
    EdgeConfig,
    EdgeSpec,
    Guarantee,
    OperatorSpec,
    Override,
    Partitioning,
    StreamComponents,
    StreamModel,
    StreamRequirement,
    with_overrides,
)
from millstream_schema.plan import PartitionedPlan, Subtask, compile_plan, job_graph, validate

F, H, R, U, B, S = (
    Partitioning.FORWARD,
    Partitioning.HASH,
    Partitioning.REBALANCE,
    Partitioning.UNION,
    Partitioning.BROADCAST,
    Partitioning.SINGLETON,
)
REPLAYABLE, TWO_PHASE = SourceCapability.REPLAYABLE.value, SinkCapability.TWO_PHASE_COMMIT.value


def op(name: str, kind: str, *, p: int | None = None, uid: bool = True, capability: str | None = None, **config: Any) -> OperatorSpec:
    """An operator; sources and sinks are strong unless said otherwise."""
    strong = {"source": REPLAYABLE, "sink": TWO_PHASE}.get(kind)
    roles = {"map": ["map"], "aggregate": ["key", "create", "add"]}.get(kind, [])
    return OperatorSpec(name, kind, uid, config, dict.fromkeys(roles, f"lambda@{name}"), {}, p, capability or strong)


def model(
    operators: list[OperatorSpec],
    edges: Iterable[tuple[Any, ...]],
    *,
    p: int = 1,
    guarantee: Guarantee = Guarantee.STRICT_EXACTLY_ONCE,
    name: str = "job",
    requirements: Iterable[StreamRequirement] = (),
    shards: int = 128,
) -> StreamModel:
    """A model with every component it uses registered."""
    components = [Component("codec", "msgpack"), Component("codec", "json")]
    components += [Component(o.kind, o.id) for o in operators if o.kind in ("source", "sink")]
    components += [Component("function", f"{o.id}.{r}") for o in operators for r in o.functions]
    specs = [EdgeSpec(e[0], e[1], e[2], side=e[3] if len(e) > 3 else None) for e in edges]
    return StreamModel(name, 1, guarantee, operators, specs, StreamComponents(components), list(requirements), shards, p)


def line(*between: tuple[OperatorSpec, Partitioning], last: Partitioning = F, **options: Any) -> StreamModel:
    """source → … → sink."""
    operators = [op("in", "source"), *(o for o, _ in between), op("out", "sink")]
    hows = [*(how for _, how in between), last]
    return model(operators, [(a.id, b.id, how) for a, b, how in zip(operators, operators[1:], hows)], **options)


def chains(m: StreamModel) -> list[list[str]]:
    return [v.operators for v in job_graph(m).vertices]


def problems(m: StreamModel) -> str:
    with pytest.raises(JobInvalid) as caught:
        compile_plan(m)
    return "\n".join(caught.value.problems)


# -- chains


def test_forward_edges_of_equal_parallelism_are_fused() -> None:
    """source → map → map → sink is one chain, at any parallelism."""
    for p in (1, 3):
        assert chains(line((op("a", "map"), F), (op("b", "map"), F), p=p)) == [["in", "a", "b", "out"]]


def test_a_hash_edge_one_to_one_runs_as_a_call_and_stays_hash_in_the_model() -> None:
    """HASH 1 → 1 needs no channel; the edge the fingerprint is made of is HASH still, so a rescale starts from the same plan."""
    m = line((op("count", "aggregate"), H))
    plan = compile_plan(m)
    assert [v.operators for v in plan.vertices] == [["in", "count", "out"]]
    assert plan.edges == []
    assert [e.partitioning for e in m.edges] == [H, F]
    wide = compile_plan(with_overrides(m, 2, {}))
    assert [(e.spec.partitioning, e.source, e.target) for e in wide.edges] == [(H, "in", "count")]
    assert [v.operators for v in wide.vertices] == [["in"], ["count", "out"]]


@pytest.mark.parametrize("how", [H, R, B])
def test_edges_that_move_records_between_subtasks_are_not_fused(how: Partitioning) -> None:
    """HASH, REBALANCE and BROADCAST at parallelism 2 have channels from each to each."""
    second = op("count", "aggregate") if how is H else op("a", "map")
    plan = compile_plan(line((second, how), p=2))
    assert [v.operators for v in plan.vertices] == [["in"], [second.id, "out"]]
    assert plan.channels("j", 7) == [
        msgspec.structs.replace(c, generation=7) for c in plan.channels("j", 1)
    ]  # the generation is in every name
    assert {(c.source, c.target) for c in plan.channels("j", 1)} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_a_fork_a_side_output_and_a_union_break_the_chain() -> None:
    """Only one producer with one consumer is fused; side outputs and unions travel on channels."""
    fork = model([op("in", "source"), op("a", "sink"), op("b", "sink")], [("in", "a", F), ("in", "b", F)])
    assert chains(fork) == [["in"], ["a"], ["b"]]
    side = model([op("in", "source"), op("late", "sink")], [("in", "late", F, "late")])
    assert chains(side) == [["in"], ["late"]]
    union = model(
        [op("x", "source"), op("y", "source"), op("u", "union"), op("out", "sink")], [("x", "u", U), ("y", "u", U), ("u", "out", F)]
    )
    assert chains(union) == [["x"], ["y"], ["u", "out"]]


def test_d16_every_edge_keeps_its_own_config_and_every_chain_is_planned() -> None:
    """Two edges with two configs: neither is taken for the other's, and no chain but the first is forgotten."""
    m = model(
        [op("in", "source"), op("a", "aggregate"), op("b", "aggregate"), op("oa", "sink"), op("ob", "sink")],
        [("in", "a", H), ("in", "b", H), ("a", "oa", R), ("b", "ob", R)],
        p=2,
    )
    m = with_overrides(
        m, None, {"a": Override(edge={"capacity": 3}), "b": Override(edge={"capacity": 5, "codec": "json"}), "ob": Override(parallelism=1)}
    )
    plan = compile_plan(m)
    assert {e.target: (e.spec.config.capacity, e.spec.config.codec) for e in plan.edges} == {
        "a": (3, "msgpack"), "b": (5, "json"), "oa": (8, "msgpack"), "ob": (8, "msgpack"),
    }  # fmt: skip
    assert [(v.id, v.parallelism) for v in plan.vertices] == [("in", 2), ("a", 2), ("b", 2), ("oa", 2), ("ob", 1)]
    assert plan.committers == ["oa:0", "oa:1", "ob:0"]


def test_every_channel_has_exactly_the_ends_the_plan_names() -> None:
    """What a subtask reads is what others write: inputs and outputs are two views of one channel set."""
    plan = compile_plan(line((op("a", "map", p=3), R), (op("count", "aggregate", p=2), H), (op("b", "map", p=1), S), last=F, p=1))
    written = {(e.id, s.index, t) for s in plan.subtasks() for e, targets in plan.outputs(s) for t in targets}
    assert written == {(c.edge, c.source, c.target) for c in plan.channels("j", 1)}
    assert len({c.name() for c in plan.channels("j", 1)}) == len(written)


# -- what is refused


@pytest.mark.parametrize("loop", [["a", "b"], ["a", "b", "c"]])
def test_t54_d17_a_cycle_is_refused_and_its_operators_are_named(loop: list[str]) -> None:
    """Back edges never compile; the message names who is on the way round."""
    operators = [op("in", "source"), op("u", "union"), *(op(i, "map") for i in loop), op("out", "sink")]
    round_trip = [(a, b, F) for a, b in zip(["u", *loop], [*loop, "u"])]
    edges = [("in", "u", U), *[(a, b, U if b == "u" else F) for a, b, _ in round_trip], (loop[0], "out", F)]
    said = problems(model(operators, edges))
    assert "cycle" in said
    assert all(f"{i}" in said for i in ["u", *loop])


def test_an_operator_that_feeds_itself_is_a_cycle() -> None:
    """The shortest cycle has one operator."""
    assert "cycle" in problems(
        model([op("in", "source"), op("u", "union"), op("out", "sink")], [("in", "u", U), ("u", "u", U), ("u", "out", F)])
    )


def test_everything_that_is_wrong_is_listed_at_once() -> None:
    """Weak ends, a stateful operator without uid or key, a foreign component, a bad edge, an unknown requirement, missing watermarks: one answer."""
    m = model(
        [
            op("in", "source", capability="NONE"),
            op("count", "aggregate", uid=False),
            op("w", "tumbling_window"),
            op("out", "sink", capability="UPSERT_BY_KEY"),
        ],
        [("in", "count", F), ("count", "w", H), ("w", "out", F)],
        name="not a name",
        requirements=[StreamRequirement("moon_phase")],
    )
    edges = [msgspec.structs.replace(m.edges[0], config=EdgeConfig(capacity=0, linger_ms=-1, compression="rar")), *m.edges[1:]]  # type: ignore[arg-type]
    said = problems(msgspec.structs.replace(m, edges=edges, components=StreamComponents([])))
    for expected in (
        "'not a name'", "source 'in' is NONE", "'count' keeps state and has no uid", "sink 'out' is UPSERT_BY_KEY", "capacity must be at least 1",
        "linger_ms", "rar", "'moon_phase'", "source 'in' is not in the components registry", "count.add is not in the components",
        "codec 'msgpack' is not in the components registry", "'count' keeps keyed state and needs key_by", "window 'w' works on event time",
    ):  # fmt: skip
        assert expected in said, expected


@pytest.mark.parametrize(
    ("guarantee", "source", "sink", "fine"),
    [
        ("STRICT_EXACTLY_ONCE", "REPLAYABLE", "TWO_PHASE_COMMIT", True),
        ("STRICT_EXACTLY_ONCE", "TRANSACTIONAL_READ", "STAGED_ATOMIC_COMMIT", True),
        ("STRICT_EXACTLY_ONCE", "REPLAYABLE", "OUTBOX_EPOCH_LOG", True),
        ("STRICT_EXACTLY_ONCE", "NONE", "TWO_PHASE_COMMIT", False),
        ("STRICT_EXACTLY_ONCE", "REPLAYABLE", "IDEMPOTENT", False),
        ("STRICT_EXACTLY_ONCE", "REPLAYABLE", "UPSERT_BY_KEY", False),
        ("STRICT_EXACTLY_ONCE", "REPLAYABLE", "NONE", False),
        ("EFFECTIVELY_ONCE", "REPLAYABLE", "UPSERT_BY_KEY", True),
        ("EFFECTIVELY_ONCE", "REPLAYABLE", "IDEMPOTENT", True),
        ("EFFECTIVELY_ONCE", "REPLAYABLE", "NONE", False),
        ("EFFECTIVELY_ONCE", "TRANSACTIONAL_READ", "UPSERT_BY_KEY", False),
        ("AT_LEAST_ONCE", "REPLAYABLE", "NONE", True),
        ("AT_LEAST_ONCE", "NONE", "NONE", False),
        ("BEST_EFFORT", "NONE", "NONE", True),
    ],
)
def test_t68_the_guarantee_is_checked_against_both_ends(guarantee: str, source: str, sink: str, fine: bool) -> None:
    """A job whose ends cannot carry its guarantee is refused, the operator named; it is never lowered."""
    m = model(
        [op("in", "source", capability=source), op("out", "sink", capability=sink)], [("in", "out", F)], guarantee=Guarantee(guarantee)
    )
    if fine:
        assert compile_plan(m).guarantee == guarantee
    else:
        said = problems(m)
        assert ("'in'" in said or "'out'" in said) and guarantee in said


def test_shapes_that_cannot_run_are_refused() -> None:
    """Joins without union, a sink with an output, a source with an input, operators nobody feeds, unequal FORWARD, SINGLETON onto many."""
    cases: list[tuple[StreamModel, str]] = [
        (model([op("x", "source"), op("y", "source"), op("out", "sink")], [("x", "out", F), ("y", "out", F)]), "join them with union"),
        (
            model([op("in", "source"), op("out", "sink"), op("out2", "sink")], [("in", "out", F), ("out", "out2", F)]),
            "cannot have an output",
        ),
        (model([op("in", "source"), op("x", "source"), op("out", "sink")], [("in", "x", F), ("x", "out", F)]), "cannot have an input"),
        (model([op("in", "source"), op("a", "map"), op("out", "sink")], [("in", "out", F)]), "'a' has no input"),
        (line((op("a", "map", p=2), F)), "equal parallelism"),
        (line((op("a", "map", p=2), S)), "SINGLETON needs parallelism 1"),
        (line((op("a", "map", p=0), F)), "parallelism must be at least 1"),
        (line((op("count", "aggregate", p=9), H), last=R, shards=8), "exceeds shard_count 8"),
        (line((op("a", "teleport"), F)), "unknown kind 'teleport'"),
        (model([op("in", "source"), op("in", "source"), op("out", "sink")], [("in", "out", F)]), "used twice"),
        (model([op("in", "source"), op("out", "sink")], [("in", "out", F), ("in", "ghost", F)]), "no operator 'ghost'"),
        (model([op("a", "map")], []), "no source"),
        (model([op("a", "map")], []), "no sink"),
    ]
    for m, expected in cases:
        assert expected in problems(m), expected


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a:b", "a.b", "ü", "a" * 64, "-a", "a\n"])
def test_d14_names_that_cannot_be_parts_of_queues_and_paths_are_refused(name: str) -> None:
    """Operator ids and job names become queue names, keys and directories: letters, digits, ``-`` and ``_`` only."""
    assert "must match" in problems(line(name=name))
    assert "must match" in problems(model([op(name, "source"), op("out", "sink")], [(name, "out", F)]))


# -- overrides


def test_overrides_change_the_model_and_its_fingerprint_never_the_original() -> None:
    """Plan-time changes give another model; the one they started from is as it was."""
    m = line((op("count", "aggregate"), H))
    before = m.fingerprint()
    changed = with_overrides(m, 2, {"count": Override(parallelism=4, edge={"capacity": 2}), "out": Override(parallelism=4)})
    assert m.fingerprint() == before
    assert changed.fingerprint() != before
    plan = compile_plan(changed)
    assert {v.id: v.parallelism for v in plan.vertices} == {"in": 2, "count": 4}
    assert plan.edges[0].spec.config.capacity == 2
    assert with_overrides(m, None, {}) == m


def test_an_override_of_nobody_or_of_no_setting_is_refused() -> None:
    """A misspelt operator or edge setting must not be passed over."""
    m = line((op("count", "aggregate"), H))
    with pytest.raises(KeyError, match="cuont"):
        with_overrides(m, None, {"cuont": Override(parallelism=2)})
    with pytest.raises(JobInvalid, match="capacty"):
        with_overrides(m, None, {"count": Override(edge={"capacty": 2})})
    with pytest.raises(JobInvalid, match="capacity"):
        with_overrides(m, None, {"count": Override(edge={"capacity": "many"})})


@pytest.mark.parametrize("p", [0, -1])
def test_rc15_a_parallelism_below_one_is_refused_wherever_it_comes_from(p: int) -> None:
    """Zero is no way of saying "default"."""
    m = line((op("count", "aggregate"), H))
    assert "parallelism must be at least 1" in problems(with_overrides(m, p, {}))
    assert "parallelism must be at least 1" in problems(with_overrides(m, None, {"count": Override(parallelism=p)}))


# -- identity


def test_a_plan_and_a_model_survive_json() -> None:
    """Plain values: what is decoded has the same fingerprint."""
    m = line((op("count", "aggregate"), H), p=3, last=R)
    plan = compile_plan(m)
    assert msgspec.json.decode(msgspec.json.encode(m), type=StreamModel).fingerprint() == m.fingerprint()
    assert msgspec.json.decode(msgspec.json.encode(plan), type=PartitionedPlan).fingerprint() == plan.fingerprint()


def test_t83_fingerprints_are_the_same_in_every_process() -> None:
    """Three interpreters with three hash seeds plan to one fingerprint and route keys alike."""
    script = (
        "from tests.unit.schema.test_plan import *\n"
        "m = line((op('count', 'aggregate'), H), p=3, last=R)\n"
        "plan = compile_plan(m)\n"
        "keys = ['a', 1, True, 1.0, b'1', ('a', 1), None]\n"
        "print(m.fingerprint(), plan.fingerprint(), [plan.owner('count', shard_of(k, 128)) for k in keys])\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(said) == 1
    m = line((op("count", "aggregate"), H), p=3, last=R)
    assert said.pop().startswith(f"{m.fingerprint()} {compile_plan(m).fingerprint()} ")


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"guarantee": Guarantee.EFFECTIVELY_ONCE},
        {"shard_count": 64},
        {"parallelism": 2},
        {"requirements": [StreamRequirement("shared_storage")]},
    ],
    ids=str,
)
def test_a9_what_matters_is_in_the_fingerprint(change: dict[str, Any]) -> None:
    """Two models that differ in anything that changes behaviour differ in their fingerprint."""
    m = line((op("count", "aggregate"), H))
    assert msgspec.structs.replace(m, **change).fingerprint() != m.fingerprint()
    assert compile_plan(msgspec.structs.replace(m, **change)).fingerprint() != compile_plan(m).fingerprint()


@given(
    parallelism=st.integers(1, 40), shards=st.integers(1, 200), keys=st.lists(st.one_of(st.integers(), st.text(max_size=6)), max_size=20)
)
@settings(deadline=None, max_examples=60)
def test_d23_every_shard_has_one_owner_and_every_key_goes_there(parallelism: int, shards: int, keys: list[Any]) -> None:
    """The shards of all subtasks are all shards, each once; the plan's owner of a key's shard is the subtask that holds the shard."""
    parallelism = min(parallelism, shards)
    plan = compile_plan(line((op("count", "aggregate", p=parallelism), H), last=R, p=1, shards=shards))
    held = [shard for i in range(parallelism) for shard in plan.shards(Subtask("count", i))] if parallelism > 1 else list(range(shards))
    assert held == list(range(shards))
    vertex = plan.vertex_of("count").id
    for key in keys:
        shard = shard_of(key, shards)
        owner = plan.owner(vertex, shard)
        assert shard in plan.shards(Subtask(vertex, owner))
        assert owner == owner_of(shard, parallelism, shards)


def test_validate_is_pure() -> None:
    """Asking twice gives the same and changes nothing."""
    m = line((op("a", "map", p=0), F))
    assert validate(m) == validate(m) != []
