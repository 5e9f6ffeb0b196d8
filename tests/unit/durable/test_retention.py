"""How long settled tasks are kept: the narrowest rule counts, and one tenant's shortens nothing of another's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream_schema.durable.retention import DEFAULT_US, RetentionRule, Scope, keep_us, shortest_us

DAY = 86_400_000_000


def rule(days: int, namespace: str = "", scope: Scope = Scope.ALL, name: str = "") -> RetentionRule:
    return RetentionRule(namespace=namespace, scope=scope, name=name, keep_us=days * DAY)


def test_the_narrowest_rule_counts() -> None:
    """Handler before queue before all; the namespace's own before everybody's; 30 days without one."""
    assert keep_us([], "a", "q", "h") == DEFAULT_US == 30 * DAY
    rules = [
        rule(9),
        rule(8, "a"),
        rule(7, scope=Scope.QUEUE, name="q"),
        rule(6, "a", Scope.QUEUE, "q"),
        rule(5, scope=Scope.HANDLER, name="h"),
    ]
    assert [keep_us(rules, *of) // DAY for of in (("b", "x", "x"), ("a", "x", "x"), ("b", "q", "x"), ("a", "q", "x"), ("a", "q", "h"))] == [
        9,
        8,
        7,
        6,
        5,
    ]
    assert keep_us([*rules, rule(0, "a", Scope.HANDLER, "h")], "a", "q", "h") == 0


RULES = st.lists(
    st.builds(
        rule, st.sampled_from([0, 1, 2, 40]), st.sampled_from(["", "a", "b"]), st.sampled_from(list(Scope)), st.sampled_from(["", "q", "h"])
    ),
    max_size=6, unique_by=lambda r: (r.namespace, r.scope, r.name),
)  # fmt: skip


@given(RULES, st.sampled_from(["a", "b"]), st.sampled_from(["q", "x"]), st.sampled_from(["h", "x"]))
def test_nothing_goes_before_the_shortest_time(rules: list[RetentionRule], namespace: str, queue: str, handler: str) -> None:
    """It is where the sweep begins to look."""
    keep, shortest = keep_us(rules, namespace, queue, handler), shortest_us(rules, namespace)
    assert keep == 0 or (shortest is not None and shortest <= keep)


@given(RULES, RULES)
def test_rules_of_other_namespaces_change_nothing(rules: list[RetentionRule], others: list[RetentionRule]) -> None:
    """Whatever they are."""
    strangers = [r for r in others if r.namespace == "b"]
    mine = [r for r in rules if r.namespace != "b"]
    assert keep_us([*mine, *strangers], "a", "q", "h") == keep_us(mine, "a", "q", "h")
