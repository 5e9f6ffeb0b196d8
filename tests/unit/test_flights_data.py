"""The flights that ship are what their README says: rows, keys, event time, and how far out of order they stand."""

from __future__ import annotations

import csv
import gzip
import io
import tarfile
import zipfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from examples.data import fetch_full

DATA = Path(fetch_full.__file__).parent / "flights-2013-01.csv.gz"
NEW_YORK = ZoneInfo("America/New_York")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    """January, as it ships."""
    with gzip.open(DATA, "rt", newline="") as lines:
        return list(csv.DictReader(lines))


def event_time(row: dict[str, str]) -> int:
    """Scheduled departure, UTC milliseconds, from the UTC column."""
    return int((datetime.fromisoformat(row["time_hour"]) + timedelta(minutes=int(row["minute"]))).timestamp() * 1000)


def behind(times: Sequence[int]) -> tuple[int, int]:
    """Greatest distance in ms of a row from the largest time before it, and how many rows are behind at all."""
    high, worst, count = times[0], 0, 0
    for time in times:
        if time < high:
            worst, count = max(worst, high - time), count + 1
        high = max(high, time)
    return worst, count


def test_january_is_whole_and_each_flight_is_there_once(rows: list[dict[str, str]]) -> None:
    """27,004 rows, all of January 2013, one for each (day, carrier, flight, origin)."""
    assert len(rows) == 27_004
    assert {(row["year"], row["month"]) for row in rows} == {("2013", "1")}
    assert len({(row["day"], row["carrier"], row["flight"], row["origin"]) for row in rows}) == len(rows)
    assert {row["origin"] for row in rows} == {"EWR", "JFK", "LGA"}


def test_the_utc_column_is_new_yorks_local_schedule(rows: list[dict[str, str]]) -> None:
    """``time_hour`` + ``minute`` is the local scheduled departure in America/New_York."""
    for row in rows[::97]:
        hour, minute = divmod(int(row["sched_dep_time"]), 100)
        local = datetime(int(row["year"]), int(row["month"]), int(row["day"]), hour, minute, tzinfo=NEW_YORK)
        assert event_time(row) == int(local.astimezone(UTC).timestamp() * 1000)


def test_january_is_as_far_out_of_order_as_stated(rows: list[dict[str, str]]) -> None:
    """18 h 59 min for one reader, and in each of two contiguous halves; far more when halves are merged row by row."""
    times = [event_time(row) for row in rows]
    half = len(times) // 2
    assert behind(times) == (68_340_000, 22_823)
    assert behind(times[:half]) == (68_340_000, 12_094)
    assert behind(times[half:]) == (68_340_000, 10_600)
    merged = [time for pair in zip(times[:half], times[half:], strict=True) for time in pair]
    assert behind(merged)[0] == 1_445_400_000


def test_bytes_that_are_not_the_expected_ones_are_refused(tmp_path: Path) -> None:
    """An archive of the right shape and other content is an error, never data."""
    inner = tmp_path / "flights.csv.zip"
    inner.write_bytes(_zip_of(b"year,month\n2013,1\n"))
    archive = tmp_path / fetch_full.ARCHIVE
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(inner, fetch_full.MEMBER)
    with pytest.raises(fetch_full.FetchFailed, match="not the one"):
        fetch_full._unpack(archive)


def _zip_of(content: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("flights.csv", content)
    return packed.getvalue()
