"""Changed parameters: a transfer that failed for its wrong account is done again with the right one, as another task of the same business.

Shows
    The parameters of a task never change: what was asked, by whom, and how it ended stays as it is. What is to be done with other
    parameters is another task, with a key of its own and the same ``business_key``, which links all that was tried for one business. It is
    no retry (``retry_of`` is empty), and it cancels nothing.

Set-up
    ``pip install millstream``. No broker: everything is in one SQLite file.

Source
    ``corrected`` below.

Command
    ``python -m examples.tasks.changed_parameters [--directory DIR]``

Input
    An order with a wrong account, and another one whose transfer is to wait until tomorrow.

Expected output
    first: FAILED: account DE-0 does not exist
    the same key with the right account: TaskConflict
    corrected: 50 sent to DE-7
    history of order-7: ann asked for DE-0 (FAILED), bob asked for DE-7 (SUCCEEDED)
    a retry of it: False
    order-8 corrected while the first one waits: 60 sent to DE-8
    the first one is not cancelled: SCHEDULED
    until somebody does it: CANCELLED

Failure path
    The second line: under its old key the request with other parameters is refused, since a key names one request. And the last three: a
    correction does not take back what still waits. Both would be done, if nobody cancelled the first one.

Clean-up
    A temporary directory removes itself; ``rm -r DIR`` otherwise.
"""

from __future__ import annotations

from pathlib import Path

from millstream import Fail, Handlers, Installation, TaskConflict, TaskFailed, TaskReceipt, Tasks, TaskWorker

from .workplace import workplace

handlers = Handlers()


@handlers.task(name="transfer", effects="idempotent")
def transfer(account: str, amount: int) -> str:
    if account == "DE-0":
        raise Fail(f"account {account} does not exist")
    return f"{amount} sent to {account}"


def corrected(desk: Tasks, old: str, account: str) -> TaskReceipt:
    """The same business with another account, under a key of its own: who presses the button twice gets the same task twice."""
    business = desk.get(old).business_key
    _, amount = desk.result(old).args
    return desk.submit(transfer, account, amount, key=f"{business}/{account}", business_key=business)


def main(directory: Path) -> None:
    installation = Installation.local(directory)
    with (
        TaskWorker(installation, handlers),
        Tasks(installation, handlers, actor="ann") as ann,
        Tasks(installation, handlers, actor="bob") as bob,
    ):
        first = ann.submit(transfer, "DE-0", 50, key="order-7", business_key="order-7")
        try:
            ann.wait(first, timeout=20)
        except TaskFailed as failure:
            print(f"first: {failure.state}: {failure.reason}")
        try:
            bob.submit(transfer, "DE-7", 50, key="order-7", business_key="order-7")
        except TaskConflict as conflict:
            print("the same key with the right account:", type(conflict).__name__)

        second = corrected(bob, first.task, "DE-7")
        print("corrected:", bob.wait(second, timeout=20))
        history = sorted(bob.list(business_key="order-7"), key=lambda row: row.created_us)
        told = (f"{row.actor} asked for {bob.result(row.id).args[0]} ({row.state})" for row in history)
        print("history of order-7:", ", ".join(told))
        print("a retry of it:", bool(bob.get(second.task).retry_of))

        waiting = ann.submit(transfer, "DE-6", 60, key="order-8", business_key="order-8", delay=86_400)
        print("order-8 corrected while the first one waits:", bob.wait(corrected(bob, waiting.task, "DE-8"), timeout=20))
        print("the first one is not cancelled:", bob.get(waiting.task).state)
        print("until somebody does it:", bob.cancel(waiting.task))


if __name__ == "__main__":
    with workplace(__doc__) as directory:
        main(directory)
