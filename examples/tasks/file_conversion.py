"""File conversion: CSV to JSON on a worker.

Shows
    A task gets addresses, not data: the file's path goes into the arguments, the file's content does not. The handler writes beside the
    target and renames, so that doing it again changes nothing: that is what ``effects="idempotent"`` promises. An input that can never be
    converted is ``Fail``: it is not tried again.

Set-up
    ``pip install millstream``. No broker: everything is in one SQLite file.

Source
    ``convert`` below. Under Celery it is the same function; the directory is then one that all workers reach.

Command
    ``python -m examples.tasks.file_conversion [--directory DIR]``

Input
    ``orders.csv`` with three rows, ``broken.csv`` whose second row has a word for a number. The example writes both.

Expected output
    orders.csv: 3 rows -> orders.json
    first row: {'order': '1', 'quantity': 2}
    broken.csv: FAILED: line 3: quantity 'two' is not a number
    the same again: replayed, 1 run
    files: broken.csv, orders.csv, orders.json

Failure path
    The third line: a row that cannot be converted. The task has failed for good and says where; no half of ``broken.json`` is left behind.

Clean-up
    A temporary directory removes itself; ``rm -r DIR`` otherwise.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

from millstream import Fail, Handlers, Installation, TaskFailed, TaskWorker

from .workplace import workplace

handlers = Handlers()


@handlers.task(name="convert", queue="files", effects="idempotent")
def convert(source: str, target: str) -> int:
    """Number of rows written."""
    rows = []
    with Path(source).open(newline="") as text:
        reader = csv.DictReader(text)
        for row in reader:
            if not row["quantity"].isdecimal():
                raise Fail(f"line {reader.line_num}: quantity {row['quantity']!r} is not a number")
            rows.append({**row, "quantity": int(row["quantity"])})
    beside = Path(target).with_suffix(".part")
    beside.write_text(json.dumps(rows, indent=1))
    beside.replace(target)  # all of it or nothing, however often
    return len(rows)


def main(directory: Path) -> None:
    orders, broken = directory / "orders.csv", directory / "broken.csv"
    orders.write_text("order,quantity\n1,2\n2,1\n3,5\n")
    broken.write_text("order,quantity\n1,2\n2,two\n")

    with TaskWorker(Installation.local(directory / "data"), handlers) as worker:
        tasks = worker.tasks
        receipt = tasks.submit(convert, str(orders), str(directory / "orders.json"), key="orders.csv")
        print(f"orders.csv: {tasks.wait(receipt, timeout=10)} rows -> orders.json")
        print("first row:", json.loads((directory / "orders.json").read_text())[0])

        unusable = tasks.submit(convert, str(broken), str(directory / "broken.json"), key="broken.csv")
        try:
            tasks.wait(unusable, timeout=10)
        except TaskFailed as failure:
            print(f"broken.csv: {failure.state}: {failure.reason}")

        again = tasks.submit(convert, str(orders), str(directory / "orders.json"), key="orders.csv")
        print(f"the same again: {'replayed' if again.replayed else 'new'}, {tasks.get(again.task).starts} run")
    print("files:", ", ".join(sorted(path.name for path in directory.iterdir() if path.is_file())))


if __name__ == "__main__":
    with workplace(__doc__) as directory:
        main(directory)
