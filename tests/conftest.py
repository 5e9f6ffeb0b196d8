"""What all tests share: servers found once, databases of one's own, and a loud list of what was missing.

Called by pytest. What must never happen here: a test that needs a server passing, or vanishing quietly, because there is none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from tests.support import services, tenancy
from tests.support.services import SERVICES, Found

_found: dict[str, Found] = {}
# How long a busy machine takes to make an example says nothing about the example.
settings.register_profile("millstream", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("millstream")


def pytest_configure(config: pytest.Config) -> None:
    """Look once, in the controlling process; xdist's workers inherit the answers as environment variables."""
    is_worker = hasattr(config, "workerinput")
    if not is_worker:
        for name, value in services.read_env().items():
            os.environ.setdefault(name, value)
    for service in SERVICES.values():
        # The absence goes first: an address that was given stays in the environment also when nothing answers there.
        inherited = is_worker and service.absent_variable not in os.environ
        found = Found(service, os.environ[service.variable], "inherited") if inherited else services.probe(service)
        _found[service.name] = found
        os.environ[service.variable if found.url else service.absent_variable] = found.url or found.how


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip by name what has no server, or fail it in CI; container scenarios run only under ``make test-docker``."""
    if item.get_closest_marker("docker") and not os.environ.get("MILLSTREAM_TEST_DOCKER"):
        pytest.skip("container scenario: run `make test-docker`")
    for name, found in _found.items():
        if item.get_closest_marker(name) is None or found.url:
            continue
        message = f"{found.service.title} IS ABSENT: {found.how}"
        if services.in_ci():
            pytest.fail(message + " (CI is set: a missing service is a failure)", pytrace=False)
        pytest.skip(message)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name in capitals what the run went without."""
    absent = [found for found in _found.values() if not found.url]
    if not absent:
        return
    terminalreporter.section(f"SERVICES ABSENT, THEIR TESTS {'FAILED' if services.in_ci() else 'SKIPPED'}", sep="!", red=True, bold=True)
    for found in absent:
        terminalreporter.write_line(f"{found.service.title}: {found.how}", red=True)
    terminalreporter.write_line("Run `make test`, which starts or installs them, or set " + ", ".join(f.service.variable for f in absent))


def _server(name: str) -> str:
    """Address of the server itself. A test that asks for it without its mark gets here when there is none."""
    found = _found[name]
    if found.url is not None:
        return found.url
    message = f"{found.service.title} IS ABSENT: {found.how}"
    if services.in_ci():
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    """SQLAlchemy URL of a PostgreSQL database of this module's own."""
    with tenancy.postgres_database(_server("postgres")) as url:
        yield url


@pytest.fixture(scope="module")
def mariadb_url() -> Iterator[str]:
    """SQLAlchemy URL of a MariaDB database of this module's own."""
    with tenancy.mariadb_database(_server("mariadb")) as url:
        yield url


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """URL of an empty Redis database of this module's own."""
    with tenancy.redis_database(_server("redis")) as url:
        yield url


@pytest.fixture(scope="session")
def rabbitmq_url() -> Iterator[str]:
    """URL of a RabbitMQ virtual host of this session's own: one for all modules, as making one takes a second."""
    with tenancy.rabbitmq_vhost(_server("rabbitmq")) as url:
        yield url
