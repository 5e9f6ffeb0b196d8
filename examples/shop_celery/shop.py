"""A Celery project with one durable task: see README.md beside this file."""

import os

from celery import Celery

from millstream import Handlers, Installation, Millstream

app = Celery("shop", broker=os.environ.get("SHOP_BROKER", "redis://127.0.0.1:6379/0"))
handlers = Handlers()
millstream = Millstream(app, Installation.local("data"), celery_app="shop:app", handlers="shop:handlers")
millstream.bind(handlers)


@handlers.task(name="send_invoice", effects="idempotent")
def send_invoice(number: int) -> str:
    """Durable: accepted by one row, run until it has succeeded, whatever dies meanwhile."""
    return f"invoice {number} is sent"


@app.task(name="greet")
def greet(name: str) -> None:
    """An ordinary Celery task beside it."""
    print(f"hello {name}")
