"""Manual recovery of a standalone task: a payment whose outcome nobody knows is not repeated by itself; a person looks, decides, and a linked task does it again.

Shows
    A handler that declares no effects is ``external``: when its outcome is unknown, the task goes into review and stays there. The decision
    "not done, do it again" makes a new task that is linked to the old one, with the reviewer's name and reason. ``wait(follow=True)``
    follows the link.

Set-up
    ``pip install millstream``. No broker: everything is in one SQLite file.

Source
    ``transfer`` and ``review`` below. On the command line: ``millstream reviews list``, ``millstream reviews retry ID --reason "…"``.

Command
    ``python -m examples.tasks.manual_recovery [--directory DIR]``

Input
    Two transfers. The bank, which the example plays, does not answer the first time: once it has booked, once it has not.

Expected output
    rent: UNKNOWN: the bank did not answer
    fee: UNKNOWN: the bank did not answer
    in review: fee, rent
    rent: the bank knows it: done
    fee: the bank does not know it: retried as another task
    rent: SUCCEEDED, booked by the bank
    fee: FAILED, superseded; the retry: SUCCEEDED, booked by the bank
    linked: same root True, retry_of True
    a second decision on fee: ReviewConflict
    the bank has booked: fee 1, rent 1

Failure path
    All of it: the outcome is unknown, and neither guess would be right: trying again would pay the rent twice, giving up would never pay
    the fee. And two people who decide at once: the second one is refused.

Clean-up
    A temporary directory removes itself; ``rm -r DIR`` otherwise.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from millstream import Handlers, Installation, NeedsReview, ReviewConflict, TaskFailed, Tasks, TaskState, TaskWorker

from .workplace import workplace

handlers = Handlers()


class Bank:
    """Played by the example: its first answer to each customer is lost, after the booking or before it."""

    def __init__(self) -> None:
        self.booked: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()

    def transfer(self, purpose: str) -> None:
        self.asked[purpose] += 1
        lost = self.asked[purpose] == 1
        if purpose == "rent" or not lost:
            self.booked[purpose] += 1
        if lost:
            raise TimeoutError


bank = Bank()


@handlers.task(name="transfer")  # effects="external": it is never repeated by itself
def transfer(purpose: str, amount: int) -> str:
    try:
        bank.transfer(purpose)
    except TimeoutError:
        raise NeedsReview("the bank did not answer") from None
    return "booked by the bank"


def review(tasks: Tasks) -> None:
    """What a person does, with the bank's statement at hand."""
    waiting = sorted(tasks.list(state=TaskState.UNKNOWN), key=lambda row: row.key)
    print("in review:", ", ".join(row.key for row in waiting))
    for row in reversed(waiting):
        if bank.booked[row.key]:
            tasks.review_done(row, result="booked by the bank", reason="it is on the statement of today")
            print(f"{row.key}: the bank knows it: done")
        else:
            tasks.review_retry(row, reason="it is not on the statement, and the bank says that it never came")
            print(f"{row.key}: the bank does not know it: retried as another task")


def main(directory: Path) -> None:
    installation = Installation.local(directory)
    with TaskWorker(installation, handlers) as worker, Tasks(installation, handlers, actor="ann") as desk:
        receipts = {purpose: worker.tasks.submit(transfer, purpose, 100, key=purpose) for purpose in ("rent", "fee")}
        for purpose, receipt in receipts.items():
            try:
                worker.tasks.wait(receipt, timeout=20)
            except TaskFailed as failure:  # at once: no wait would end this
                print(f"{purpose}: {failure.state}: {failure.reason}")
        stale = worker.tasks.get(receipts["fee"].task)  # somebody else has it on the screen, too
        review(desk)

        answer = worker.tasks.wait(receipts["fee"], timeout=20, follow=True)
        rent, fee = (worker.tasks.get(receipts[purpose].task) for purpose in ("rent", "fee"))
        again = worker.tasks.get(fee.superseded_by)
        print(f"rent: {rent.state}, {worker.tasks.wait(rent.id)}")
        print(f"fee: {fee.state}, superseded; the retry: {again.state}, {answer}")
        print(f"linked: same root {again.root == fee.root}, retry_of {again.retry_of == fee.id}")
        try:
            worker.tasks.review_done(stale, reason="I think it came through")
        except ReviewConflict as conflict:
            print("a second decision on fee:", type(conflict).__name__)
    print("the bank has booked:", ", ".join(f"{purpose} {bank.booked[purpose]}" for purpose in ("fee", "rent")))


if __name__ == "__main__":
    with workplace(__doc__) as directory:
        main(directory)
