"""The carriers under test: the same properties are shown for all four."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.contract.channels.harness import Carrier, Pair, make_carrier

CARRIERS = [
    "memory",
    "unix",
    pytest.param("redis", marks=pytest.mark.redis),
    pytest.param("rabbitmq", marks=pytest.mark.rabbitmq),
]


@pytest.fixture(params=CARRIERS)
def carrier(request: pytest.FixtureRequest) -> Iterator[Carrier]:
    """One carrier after the other."""
    url = request.getfixturevalue(f"{request.param}_url") if request.param in ("redis", "rabbitmq") else ""
    yield from make_carrier(request.param, url)


@pytest.fixture
def pair(carrier: Carrier) -> Pair:
    """A channel with a window of eight."""
    return Pair(carrier, 8)
