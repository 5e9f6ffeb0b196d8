"""The same answer computed apart, in one pass over the table, sharing no code with the job; and the check of a sink against it."""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

Row = tuple[str, str, int, int, int, int]

CREATE = (
    "CREATE TABLE flights_per_day (carrier VARCHAR(8) NOT NULL, origin VARCHAR(8) NOT NULL, day BIGINT NOT NULL, "
    "flights BIGINT NOT NULL, cancelled BIGINT NOT NULL, delay_minutes BIGINT NOT NULL)"
)
SELECT = "SELECT carrier, origin, day, flights, cancelled, delay_minutes FROM flights_per_day"


def answer(table: Path) -> dict[tuple[str, str, int], tuple[int, int, int]]:
    """(carrier, origin, start of the UTC day in ms) → (flights, cancelled, minutes of delay)."""
    totals: dict[tuple[str, str, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    with table.open(newline="") as file:
        for flight in csv.DictReader(file):
            departs = datetime.strptime(flight["time_hour"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC) + timedelta(
                minutes=int(flight["minute"])
            )
            midnight = departs.replace(hour=0, minute=0)
            entry = totals[flight["carrier"], flight["origin"], int(midnight.timestamp() * 1000)]
            entry[0] += 1
            if flight["dep_delay"] in ("", "NA"):
                entry[1] += 1
            else:
                entry[2] += int(flight["dep_delay"])
    return {key: (v[0], v[1], v[2]) for key, v in totals.items()}


def difference(rows: list[Row], expected: dict[tuple[str, str, int], tuple[int, int, int]]) -> list[str]:
    """Every way in which the sink's rows are not the answer; empty when they are."""
    seen = Counter((r[0], r[1], int(r[2])) for r in rows)
    found = [f"{key} is there {n} times" for key, n in seen.items() if n > 1]
    found += [f"{key} is missing" for key in expected if key not in seen]
    for carrier, origin, day, *values in rows:
        want = expected.get((carrier, origin, int(day)))
        if want is None:
            found.append(f"{(carrier, origin, day)} should not be there")
        elif tuple(int(v) for v in values) != want:
            found.append(f"{(carrier, origin, day)} is {tuple(values)}, should be {want}")
    return found
