"""The job: flights per carrier and airport and day, by scheduled departure in UTC.

Source order is file order, which is far from time order: within a day the table is sorted by actual departure, cancelled flights last. The stated bound holds for every
record (``docs`` of the data name the measured figure), so no record is late.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import pydantic

from millstream import FileSource, JobBuilder, Pipelines, SqlAppendSink

OUT_OF_ORDERNESS_MS = 24 * 3_600_000
"""Stated bound; measured: 18 h 59 min in January, 22 h 53 min over the year in calendar order."""
DAY_MS = 86_400_000
COLUMNS = ("carrier", "origin", "day", "flights", "cancelled", "delay_minutes")

pipelines = Pipelines()


class FlightsConfig(pydantic.BaseModel):
    """``path``: the CSV table. ``target``: URL of the database with table ``flights_per_day``. ``pace_us``: pause per record, to replay slowly; 0 for full speed."""

    model_config = pydantic.ConfigDict(extra="forbid")

    path: str
    target: str
    pace_us: int = pydantic.Field(default=0, ge=0, le=1_000_000)


def scheduled_ms(flight: dict[str, str]) -> int:
    """Scheduled departure, UTC ms: ``time_hour`` is the full hour in UTC, ``minute`` the minute within it."""
    hour = datetime.fromisoformat(flight["time_hour"])
    return int(hour.timestamp()) * 1000 + int(flight["minute"]) * 60_000


def route(flight: dict[str, str]) -> tuple[str, str]:
    return flight["carrier"], flight["origin"]


Totals = tuple[int, int, int]
"""Flights, cancelled ones, minutes of departure delay."""


def nothing() -> Totals:
    return (0, 0, 0)


def count(totals: Totals, flight: dict[str, str]) -> Totals:
    flights, cancelled, delay = totals
    if flight["dep_delay"] in ("", "NA"):
        return flights + 1, cancelled + 1, delay
    return flights + 1, cancelled, delay + int(flight["dep_delay"])


def merge(left: Totals, right: Totals) -> Totals:
    return left[0] + right[0], left[1] + right[1], left[2] + right[2]


def row(key: tuple[str, str], window: Any, totals: Totals) -> tuple[Any, ...]:
    return (*key, window.start, *totals)


@pipelines.define("flights", version=1, guarantee="STRICT_EXACTLY_ONCE", parallelism=2, config=FlightsConfig)
def flights(job: JobBuilder, config: FlightsConfig) -> None:
    source = FileSource(config.path, "csv", header=True, multiline=False, splits_per_file=2)
    stream = job.source(source, uid="table").assign_timestamps(scheduled_ms, out_of_orderness_ms=OUT_OF_ORDERNESS_MS, uid="scheduled")
    if config.pace_us:
        pause = config.pace_us / 1e6

        def paced(flight: dict[str, str]) -> dict[str, str]:
            time.sleep(pause)
            return flight

        stream = stream.map(paced, uid="pace")
    per_day = stream.key_by(route).tumbling(DAY_MS).aggregate(nothing, count, row, merge=merge, uid="per-day")
    per_day.sink_to(SqlAppendSink(config.target, "flights_per_day", COLUMNS), uid="result")
