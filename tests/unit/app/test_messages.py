"""What carries hints goes on, whatever kombu raises."""

from __future__ import annotations

import threading

import structlog
from celery import Celery

from millstream.messages import Carrier

SECONDS = 20


def test_a_broker_whose_driver_cannot_be_loaded_is_told_of_and_tried_again() -> None:
    """A thread that died of it would tell nothing any more, and hints would stay out when the driver is there."""
    carrier, tries, again = Carrier(Celery("shop", broker="nowhere://ann:secret@host//"), "shop"), [], threading.Event()

    def loop() -> None:
        tries.append(1)
        if len(tries) == 2:
            again.set()
        with carrier._connection():
            raise AssertionError("there is no such transport")

    with structlog.testing.capture_logs() as logs:
        carrier._spawn("send", loop)
        assert again.wait(SECONDS)
        carrier.close()
    assert "nowhere" in logs[0]["error"] and "secret" not in str(logs)
