"""A worker on threads of this process, as a newcomer meets it: where it begins, and what is left when it has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream import ConfigurationError, Handlers, Installation, Subscriptions, TaskFailed, Tasks, TaskWorker
from millstream_tasks.durable.host import TaskHost

handlers = Handlers()


@handlers.task(name="greet", effects="idempotent", attempts=1)
def greet(whom: str) -> str:
    if not whom:
        raise ValueError("nobody is there")
    return f"hello {whom}"


def test_the_directory_of_an_installation_need_not_be_there(tmp_path: Path) -> None:
    """``Installation.local("data")`` in an empty project works, as ``millstream --local data up`` does."""
    with TaskWorker(Installation.local(tmp_path / "deep" / "data"), handlers) as worker:
        assert worker.tasks.wait(worker.tasks.submit(greet, "Ada"), timeout=30) == "hello Ada"


def test_a_worker_that_has_ended_serves_nothing_though_its_lease_still_holds(tmp_path: Path) -> None:
    """``why`` names what is missing at once, not when the lease is over; the same after a run and after none."""
    installation = Installation.local(tmp_path, lease_ms=600_000)
    with TaskWorker(installation, handlers) as worker:
        worker.tasks.wait(worker.tasks.submit(greet, "Ada"), timeout=30)
    with TaskWorker(installation, handlers):
        pass
    with Tasks(installation, handlers) as tasks:
        waiting = tasks.submit(greet, "Grace")
        assert tasks.why(waiting.task) == "no live worker serves queue 'default'"


def test_a_step_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of ours is logged; the worker does not stop serving without a word."""
    failed: list[TaskHost] = []
    step = TaskHost.step

    def fails_once(host: TaskHost) -> float:
        if not failed:
            failed.append(host)
            raise RuntimeError("a defect")
        return step(host)

    monkeypatch.setattr(TaskHost, "step", fails_once)
    with TaskWorker(Installation.local(tmp_path), handlers) as worker:
        assert worker.tasks.wait(worker.tasks.submit(greet, "Ada"), timeout=30) == "hello Ada"
    assert failed


def test_a_failure_says_of_which_task_it_is_and_why_in_parts(tmp_path: Path) -> None:
    """A program needs no pattern to read the message."""
    with TaskWorker(Installation.local(tmp_path), handlers) as worker:
        receipt = worker.tasks.submit(greet, "")
        with pytest.raises(TaskFailed) as caught:
            worker.tasks.wait(receipt, timeout=30)
    failure = caught.value
    assert (failure.task, failure.state, failure.cause) == (receipt.task, "FAILED", "attempts")
    assert failure.reason.startswith("ValueError: nobody is there")


def test_a_consumer_waits_for_its_next_delivery_and_no_longer(tmp_path: Path) -> None:
    """``pull(wait=)`` comes back with the first one, or empty when the time is over."""
    installation = Installation.local(tmp_path)
    with TaskWorker(installation, handlers) as worker, Subscriptions(installation) as subscriptions:
        subscriptions.create("greeted", handler="greet")
        assert list(subscriptions.pull("greeted", wait=0.05)) == []
        worker.tasks.submit(greet, "Ada")
        [delivery] = subscriptions.pull("greeted", wait=30)
        assert delivery.result == "hello Ada"
        with pytest.raises(ConfigurationError, match="wait must be a number of seconds"):
            subscriptions.pull("greeted", wait=-1)
