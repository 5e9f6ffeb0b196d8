"""A payment whose worker is killed with -9 in the middle: the books have it once all the same."""

import multiprocessing
import os
import signal
import sqlite3

from millstream import Handlers, Installation, TaskContext, TaskWorker

installation = Installation.local("data", lease_ms=1_500)  # a worker that is silent for so long is taken for dead
handlers = Handlers()


@handlers.task(name="pay", effects="transactional")
def pay(ctx: TaskContext, account: str, amount: int) -> None:
    with ctx.transaction() as tx:  # what is written here commits together with the end of the task, or not at all
        tx.execute("INSERT INTO payments VALUES (:account, :amount)", {"account": account, "amount": amount})
        if ctx.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # the worst moment: done, and not committed
        tx.result(f"{amount} paid")


def first_worker() -> None:
    with TaskWorker(installation, handlers) as worker:
        sqlite3.connect("data/millstream.db").execute("CREATE TABLE payments (account TEXT, amount INTEGER)")
        worker.tasks.wait(worker.tasks.submit(pay, "Ada", 30, key="invoice-7"))


if __name__ == "__main__":
    doomed = multiprocessing.get_context("spawn").Process(target=first_worker)
    doomed.start()
    doomed.join()
    assert doomed.exitcode == -signal.SIGKILL

    with TaskWorker(installation, handlers) as worker:  # another one takes over
        receipt = worker.tasks.submit(pay, "Ada", 30, key="invoice-7")  # the same request again is the same task
        answer = worker.tasks.wait(receipt, timeout=30)
        attempts = worker.tasks.get(receipt.task).starts

    books = sqlite3.connect("data/millstream.db")
    booked = books.execute("SELECT account, amount FROM payments").fetchall()
    books.close()
    assert booked == [("Ada", 30)] and receipt.replayed and attempts == 2
    print(f"{answer} at attempt {attempts}, {len(booked)} row in the books")
