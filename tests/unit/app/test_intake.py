"""The task process's end of plain Celery messages: one that fails as nobody expected holds up no other."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from millstream.intake import Answered, Arrived, Intake, decode_answered, encode
from millstream.tasks import Request
from millstream_schema.durable.records import Receipt
from millstream_schema.durable.requests import Options, encode_arguments
from millstream_schema.durable.states import TaskState
from millstream_tasks.shell.wire import pack, receive


class Client:
    """Takes requests, and breaks at one."""

    def accept(self, requests: Sequence[Request]) -> list[Receipt]:
        if any(r.key == "breaks" for r in requests):
            raise ZeroDivisionError("a defect")
        return [Receipt(f"task-{r.key}", TaskState.READY, "1:d") for r in requests]


def test_a_message_that_meets_a_defect_holds_up_no_other() -> None:
    """It is not answered, and so stays with its broker; the rest of its batch and what comes later is."""
    ours, theirs = socket.socketpair()
    client: Any = Client()
    intake = Intake(theirs, client)
    ours.settimeout(20)
    with ours:
        for key in ("a", "breaks", "b"):
            ours.sendall(pack(encode(Arrived(key, "work", encode_arguments((), {}), Options(), "me"))))
        intake.start()
        answers = [decode_answered(receive(ours) or b"") for _ in range(2)]
        ours.sendall(pack(encode(Arrived("later", "work", encode_arguments((), {}), Options(), "me"))))
        answers.append(decode_answered(receive(ours) or b""))
        intake.close()
    assert answers == [Answered("a", ""), Answered("b", ""), Answered("later", "")]
