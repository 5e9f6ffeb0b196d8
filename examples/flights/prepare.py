"""Prepare the flights job: unpack the month's table and create ``flights_per_day`` in the target database.

Run: ``python -m examples.flights.prepare DATABASE_URL DIRECTORY``; prints the path to give the job as ``path``. Harmless when repeated.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from pathlib import Path

import sqlalchemy as sa
from examples.flights.reference import CREATE

MONTH = Path(__file__).parents[1] / "data" / "flights-2013-01.csv.gz"


def unpack(directory: Path) -> Path:
    """The month as a plain CSV file below ``directory``: byte ranges of it can be read in parallel."""
    directory.mkdir(parents=True, exist_ok=True)
    table = directory / "flights-2013-01.csv"
    table.write_bytes(gzip.decompress(MONTH.read_bytes()))
    return table


def create_target(url: str) -> None:
    """Create the sink's table unless it is there."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        if not sa.inspect(connection).has_table("flights_per_day"):
            connection.exec_driver_sql(CREATE)
    engine.dispose()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.flights.prepare", description=__doc__)
    parser.add_argument("database", help="SQLAlchemy URL of the database the results go to")
    parser.add_argument("directory", type=Path, help="where the table is unpacked; every worker must reach it")
    args = parser.parse_args(argv)
    create_target(args.database)
    sys.stdout.write(f"{unpack(args.directory)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
