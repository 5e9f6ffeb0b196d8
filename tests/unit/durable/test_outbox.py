"""What becomes of an outbox entry: bounded pauses, bounded sends, never a new key."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_schema.durable.outbox import (
    DAY_US,
    ENTRY_TRANSITIONS,
    Accepted,
    AnySending,
    EntryCause,
    EntryRow,
    EntryState,
    Failed,
    Limits,
    Refused,
    on_claim,
    on_sent,
    pause_us,
    retried,
)

E, C = EntryState, EntryCause
LIMITS = Limits()


def entry(**changes: object) -> EntryRow:
    base = EntryRow(
        id="task-1", target="i", namespace="default", handler="h", key="k", digest="1:x", request="{}", state=E.WAITING, cause=C.NONE, reason="", task="",
        sends=0, tries=0, failures=0, owner="", claim="", generation=0, lease_us=0, due_us=0, since_us=0, created_us=0, sent_us=0, changed_us=0, actor="",
        rev=0,
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def test_an_entry_about_as_old_as_keys_are_kept_is_parked_before_it_is_sent() -> None:
    """Sent again it could run twice; younger ones are sent."""
    assert on_claim(entry(), LIMITS, 29 * DAY_US).cause is C.OLD
    assert on_claim(entry(), LIMITS, 29 * DAY_US - 1).state is E.SENDING
    assert on_claim(entry(since_us=DAY_US), LIMITS, 29 * DAY_US).state is E.SENDING


def test_sends_are_bounded_and_the_last_reason_is_kept() -> None:
    """Counted since it was put in or a person had it sent again, not ever."""
    parked = on_claim(entry(tries=LIMITS.sends, sends=5000, reason="no route"), LIMITS, 0)
    assert (parked.state, parked.cause) == (E.PARKED, C.SENDS) and "no route" in parked.reason
    assert on_claim(entry(tries=0, sends=5000), LIMITS, 0).state is E.SENDING


@pytest.mark.parametrize("cause", [C.CONFLICT, C.INVALID, C.REFUSED], ids=str)
def test_what_is_refused_is_parked_at_once(cause: EntryCause) -> None:
    """Nothing is tried again that will be refused again; the reason is kept."""
    found = on_sent(entry(state=E.SENDING), LIMITS, Refused(cause, "no"), 7, 0.5)
    assert (found.state, found.cause, found.reason, found.task) == (E.PARKED, cause, "no", "")


def test_what_is_accepted_is_sent_and_names_its_task() -> None:
    """Also one whose receipt says that it was known."""
    assert on_sent(entry(state=E.SENDING), LIMITS, Accepted("task-9"), 7, 0.5).task == "task-9"


@given(failures=st.integers(0, 10_000), chance=st.floats(0, 1, exclude_max=True), now=st.integers(0, 2**52))
def test_pauses_double_up_to_a_limit_and_never_vanish(failures: int, chance: float, now: int) -> None:
    """An installation that asks for more time gets it."""
    found = on_sent(entry(state=E.SENDING, failures=failures), LIMITS, Failed(C.AWAY, "gone"), now, chance)
    pause = found.due_us - now
    assert found.state is E.WAITING and found.failures == 1
    assert LIMITS.first_ms * 800 <= pause <= LIMITS.longest_ms * 1000
    assert pause <= pause_us(LIMITS, failures + 1, 0.0)
    throttled = on_sent(entry(state=E.SENDING, failures=failures), LIMITS, Failed(C.THROTTLED, "full", 10**10), now, chance)
    assert throttled.due_us - now == 10**10


@pytest.mark.parametrize(
    ("changes", "may"),
    [
        ({"state": E.PARKED, "cause": C.SENDS, "sends": 9}, True),
        ({"state": E.PARKED, "cause": C.REFUSED, "sends": 9}, True),
        ({"state": E.PARKED, "cause": C.OLD}, True),
        ({"state": E.PARKED, "cause": C.OLD, "sends": 1}, False),
        ({"state": E.PARKED, "cause": C.CONFLICT}, False),
        ({"state": E.PARKED, "cause": C.INVALID}, False),
        ({"state": E.WAITING}, False),
        ({"state": E.SENT}, False),
    ],
    ids=["sends", "refused", "old and never sent", "old and sent", "conflict", "invalid", "waiting", "sent"],
)
def test_a_person_has_sent_again_what_cannot_run_twice(changes: dict[str, object], may: bool) -> None:
    """And what would not be refused again as it is."""
    assert (retried(entry(**changes)) == "") is may


def test_every_decision_is_a_transition_of_the_table() -> None:
    """The diagram is what happens."""
    sending: list[AnySending] = [Accepted("t"), Refused(C.CONFLICT, ""), Failed(C.AWAY, "")]
    assert {on_sent(entry(state=E.SENDING), LIMITS, s, 0, 0.0).state for s in sending} <= ENTRY_TRANSITIONS[E.SENDING]
    assert {on_claim(entry(), LIMITS, now).state for now in (0, 30 * DAY_US)} <= ENTRY_TRANSITIONS[E.WAITING]
