import datetime

from millstream import FileSink, FileSource, Pipelines

HOUR = 3_600_000

pipelines = Pipelines()


def placed_at(order):
    return int(datetime.datetime.fromisoformat(order["at"]).timestamp() * 1000)


def customer(order):
    return order["customer"]


def add(total, order):
    return total + order["amount"]


def line(customer, window, total):
    return {"customer": customer, "hour": window.start // HOUR % 24, "total": total}


@pipelines.define("revenue", version=1, guarantee="STRICT_EXACTLY_ONCE")
def revenue(job, config):
    orders = job.source(FileSource(config["orders"], "jsonl"), uid="orders")
    timed = orders.assign_timestamps(placed_at, out_of_orderness_ms=60_000, uid="placed")
    per_hour = timed.key_by(customer).tumbling(HOUR).aggregate(int, add, line, uid="per-hour")
    per_hour.sink_to(FileSink(config["out"]), uid="out")
