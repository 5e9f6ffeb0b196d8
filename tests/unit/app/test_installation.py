"""An installation is refused with the spelling, variable, value and range that would do."""

from __future__ import annotations

from pathlib import Path

import pytest
from celery import Celery

from millstream import ConfigurationError, Installation, Millstream
from millstream.installation import address_of
from millstream_tasks.opening import open_storage

GOOD = {"database": "sqlite:////tmp/m.db", "transport": "unix:///tmp/run", "checkpoints": "file:///tmp/checkpoints"}


def refusal(**changes: object) -> str:
    with pytest.raises(ConfigurationError) as found:
        Installation.checked(GOOD | changes)
    assert "\n" not in str(found.value)
    return str(found.value)


@pytest.mark.parametrize(
    ("scheme", "spelling"),
    [
        ("postgres", "postgresql+psycopg://"),
        ("postgresql", "postgresql+psycopg://"),
        ("postgresql+psycopg2", "postgresql+psycopg://"),
        ("postgresql+asyncpg", "postgresql+psycopg://"),
        ("mysql", "mysql+pymysql://"),
        ("mysql+mysqldb", "mysql+pymysql://"),
        ("mariadb", "mysql+pymysql://"),
        ("oracle", "sqlite:///"),
    ],
)
def test_a_database_url_without_our_driver_is_refused_with_the_spelling_to_write(scheme: str, spelling: str) -> None:
    """The exact scheme is named, the variable too, and no password."""
    said = refusal(database=f"{scheme}://me:hunter22@host/name")
    assert spelling in said and f"{scheme}://" in said and "MILLSTREAM_DATABASE" in said
    assert "hunter22" not in said


@pytest.mark.parametrize(
    "url", ["sqlite:///m.db", "postgresql+psycopg://u@h/d", "mysql+pymysql://u@h/d", "mariadb+pymysql://u@h/d", "sqlite+pysqlite:///m.db"]
)
def test_the_spellings_that_are_asked_for_are_taken(url: str) -> None:
    """As they are."""
    assert Installation.checked(GOOD | {"database": url}).database == url


def test_checkpoints_may_be_a_path_or_its_url(tmp_path: Path) -> None:
    """Both name the same directory, also when it has to be quoted; a node opens it."""
    directory = tmp_path / "a b#c"
    plain, url = (Installation.checked(GOOD | {"checkpoints": c}).checkpoints for c in (str(directory), directory.as_uri()))
    assert plain == url == directory.as_uri()
    handle = open_storage(plain).put("k", b"v")
    assert open_storage(str(directory)).get(handle) == b"v"


@pytest.mark.parametrize("given", ["relative/directory", "file://relative", "file:relative", "s3://bucket", "sqlite", ""])
def test_checkpoints_that_are_neither_path_nor_url_are_refused_when_they_are_given(given: str) -> None:
    """Not only when the first node starts."""
    said = refusal(checkpoints=given)
    assert "file:///directory or /directory" in said and "MILLSTREAM_CHECKPOINTS" in said


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("lease_ms", "soon", ("lease_ms (MILLSTREAM_LEASE_MS) is 'soon'", "whole number of ms", "at least 600", "at most 600000")),
        ("lease_ms", "5", ("is '5'", "at least 600")),
        ("poll_ms", 1.5, ("poll_ms (MILLSTREAM_POLL_MS) is 1.5", "whole number of ms", "at least 10")),
        ("channel_expiry_ms", 1, ("channel_expiry_ms", "at least 3600000")),
        ("prefix", "Shop", ("prefix (MILLSTREAM_PREFIX) is 'Shop'", "lower-case")),
        ("colour", "red", ("no setting 'colour'", "known: database, transport")),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_unit_and_range(field: str, value: object, told: tuple[str, ...]) -> None:
    """One sentence a reader can act on."""
    said = refusal(**{field: value})
    assert [t for t in told if t not in said] == []


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:s3cret@h:6379/1", "redis://h:6379/1"),
        ("rediss://u:s3cret@h/0?socket_timeout=5", "rediss://h/0"),
        ("amqp://u:s3cr/et@h:5672//", "amqp://h:5672//"),
        ("amqp://u:s3cr@et@h:5672/v", "amqp://h:5672/v"),
        ("redis://h/0?password=s3c@ret", "redis://h/0"),
        ("unix:///run/m", "unix:///run/m"),
    ],
)
def test_an_address_is_shown_without_what_is_secret(url: str, shown: str) -> None:
    """Host, port and path; no user, password or option."""
    assert address_of(url) == shown


def test_durable_tasks_alone_need_a_database_and_stream_jobs_say_what_else() -> None:
    """Somebody with tasks only is not asked for channels and checkpoints; a node, and a Celery application with pipelines, are."""
    found = Installation(database=GOOD["database"])
    assert Installation.from_environment(found.environment()) == found
    with pytest.raises(
        ConfigurationError, match=r"transport \(MILLSTREAM_TRANSPORT\): not given.*checkpoints \(MILLSTREAM_CHECKPOINTS\): not given"
    ):
        Millstream(Celery("shop"), found, celery_app="shop:app", pipelines="shop:pipelines")
    assert Millstream(Celery("shop"), found, celery_app="shop:app", handlers="shop:handlers").installation == found
    with pytest.raises(ConfigurationError, match="names no checkpoint storage: set MILLSTREAM_CHECKPOINTS"):
        open_storage(found.checkpoints)
