"""Asking a source for its splits: an outage of its system is waited out, as in reading; anything else is final."""

from __future__ import annotations

import pytest
from tests.unit.tasks.parts import HandLanes, HandTransport, quiet_world

from millstream.testing.outside import SimStorage
from millstream.testing.world import SimClock
from millstream_schema.connectors import Split
from millstream_schema.control import Discovered, SubtaskMessage
from millstream_schema.errors import SourceError, SourceUnavailable
from millstream_tasks.runner.discovery import GIVE_UP, Discovery
from millstream_tasks.runner.environment import Environment
from millstream_tasks.sources.memory import CollectionSource


class Away(CollectionSource):
    """Finds what is in ``there``; raises ``error`` while there is one."""

    def __init__(self, bounded: bool = False) -> None:
        super().__init__([])
        self.bounded = bounded
        self.there: list[str] = ["a"]
        self.error: Exception | None = None
        self.asked = 0

    def discover(self, known: frozenset[str]) -> list[Split]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return [Split(name) for name in self.there if name not in known]


class Asking:
    """A discovery whose clock the test holds."""

    def __init__(self, source: Away) -> None:
        self.world = quiet_world()
        self.reports: list[SubtaskMessage] = []
        clock = SimClock(self.world)
        environment = Environment(
            HandTransport(), SimStorage(self.world), clock, HandLanes(), self.reports.append, lambda: None, "hand"
        )  # fmt: skip
        self.discovery = Discovery("in", source, set(), environment, 5.0)
        self._clock = clock

    def after(self, seconds: float) -> None:
        self.world.now += seconds
        self.discovery.turn(self._clock.monotonic())

    def found(self) -> list[list[str]]:
        return [[s.split_id for s in r.splits] for r in self.reports if isinstance(r, Discovered)]


OUTAGE = SourceUnavailable("no connection")


@pytest.mark.parametrize("bounded", [False, True])
def test_a_source_that_cannot_be_reached_at_the_start_is_asked_again_until_it_answers(bounded: bool) -> None:
    """The first answer is reported, late; a bounded source that answered is asked no more."""
    source = Away(bounded)
    source.error = OUTAGE
    asking = Asking(source)
    asking.discovery.look()
    for _ in range(10):
        asking.after(1.0)
    assert asking.found() == []
    source.error = None
    asking.after(2.0)
    assert asking.found() == [["a"]]
    asked = source.asked
    for _ in range(20):
        asking.after(1.0)
    assert (source.asked == asked) is bounded


def test_what_is_known_stays_known_through_an_outage() -> None:
    """Afterwards only what is new is reported, and the outage before does not shorten the next."""
    source = Away()
    asking = Asking(source)
    asking.discovery.look()
    for _ in range(3):
        source.error = OUTAGE
        for _ in range(25):
            asking.after(1.0)
        source.error = None
        asking.after(2.0)
    source.there.append("b")
    asking.after(5.0)
    assert asking.found() == [["a"], ["b"]]


def test_the_pauses_grow_and_an_outage_that_lasts_too_long_fails_the_subtask() -> None:
    """Nobody waits for ever, and a system that is down is not hammered."""
    source = Away()
    asking = Asking(source)
    asking.discovery.look()
    source.error = OUTAGE
    with pytest.raises(SourceUnavailable, match=r"'in'.*30 s.*no connection"):
        for _ in range(round(2 * GIVE_UP / 0.01)):
            asking.after(0.01)
    assert source.asked < 30


def test_a_source_says_itself_how_long_it_may_be_away() -> None:
    """``give_up`` = 0: the first outage is final."""
    source = Away()
    source.give_up = 0.0  # type: ignore[attr-defined]
    source.error = OUTAGE
    with pytest.raises(SourceUnavailable):
        Asking(source).discovery.look()


def test_any_other_error_of_a_source_is_final() -> None:
    """A login that is refused, or a defect, does not mend itself."""
    source = Away()
    for error in (SourceError("the login is refused"), ValueError("a defect")):
        source.error = error
        with pytest.raises(type(error)):
            Asking(source).discovery.look()
