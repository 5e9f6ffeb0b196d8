"""The shop's durable tasks."""

from millstream import Handlers

handlers = Handlers()


@handlers.task(name="confirm", effects="idempotent")
def confirm(order: int) -> str:
    return f"order {order} is confirmed"
