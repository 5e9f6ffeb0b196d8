"""Fixtures of the simulation tier."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.simulation.base import Workload
from tests.simulation.replay import quiet
from tests.simulation.scene import Scene

from millstream.testing.simulation import Faults

gc.set_threshold(100_000, 50, 50)  # runs make few cycles and very many short-lived values: a tenth of the tier's time


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    quiet()
    yield


@pytest.fixture
def scene() -> Iterator[Callable[..., Any]]:
    """``scene(kind=Scene, seed=0, faults=None, **settings)``: a simulated job, submitted, closed at the end of the test."""
    made: list[Workload] = []

    def make(kind: type[Scene] = Scene, seed: int = 0, faults: Faults | None = None, **settings: Any) -> Scene:
        one = kind(seed, faults, **settings)
        made.append(one)
        one.start()
        return one

    yield make
    for one in made:
        one.sim.close()
