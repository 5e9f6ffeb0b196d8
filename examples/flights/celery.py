"""The Celery application: ``celery -A examples.flights worker``, ``celery -A examples.flights beat``.

Where things are comes from the environment: ``MILLSTREAM_BROKER_URL`` (Celery's broker), ``MILLSTREAM_DATABASE``, ``MILLSTREAM_TRANSPORT``, ``MILLSTREAM_CHECKPOINTS``.
"""

from __future__ import annotations

import os

from celery import Celery

from millstream.installation import Installation
from millstream.worker import Millstream

app = Celery("flights", broker=os.environ.get("MILLSTREAM_BROKER_URL", "amqp://guest:guest@127.0.0.1:5672//"))
app.conf.update(task_serializer="json", accept_content=["json"], broker_connection_retry_on_startup=True, worker_send_task_events=True)
millstream = Millstream(
    app,
    Installation.from_environment(os.environ),
    celery_app="examples.flights.celery:app",
    pipelines="examples.flights.jobs:pipelines",
    slots=int(os.environ.get("MILLSTREAM_SLOTS", "8")),
)
