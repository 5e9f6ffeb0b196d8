"""Revenue per customer and hour, from a file of orders to files of totals."""

import datetime
from typing import Any

from millstream import FileSink, FileSource, JobBuilder, Pipelines, Window

HOUR = 3_600_000
Order = dict[str, Any]
pipelines = Pipelines()


def placed_at(order: Order) -> int:
    return int(datetime.datetime.fromisoformat(order["at"]).timestamp() * 1000)  # UTC milliseconds


def customer(order: Order) -> str:
    return str(order["customer"])


def add(total: int, order: Order) -> int:
    return total + int(order["amount"])


def line(customer: str, window: Window, total: int) -> dict[str, Any]:
    return {"customer": customer, "from": window.start, "to": window.end, "total": total}


@pipelines.define("revenue", version=1, guarantee="STRICT_EXACTLY_ONCE")
def revenue(job: JobBuilder, config: dict[str, Any]) -> None:
    orders = job.source(FileSource(config["orders"], "jsonl"), uid="orders")
    timed = orders.assign_timestamps(placed_at, out_of_orderness_ms=60_000, uid="placed")
    per_hour = timed.key_by(customer).tumbling(HOUR).aggregate(int, add, line, uid="per-hour")
    per_hour.sink_to(FileSink(config["out"]), uid="out")
