"""The Celery application of the acceptance and chaos tests: ``celery -A tests.acceptance.application worker``. Where things are comes from the environment."""

from __future__ import annotations

import os

from celery import Celery

from millstream.installation import Installation
from millstream.worker import Millstream

prefix = os.environ["MILLSTREAM_PREFIX"]
app = Celery("acceptance", broker=os.environ["MILLSTREAM_BROKER_URL"])
app.conf.update(
    task_serializer="json",
    accept_content=["json"],
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    task_default_queue=f"{prefix}.tasks",
    event_queue_prefix=f"{prefix}.events",
    worker_send_task_events=True,
)
if "MILLSTREAM_VISIBILITY_TIMEOUT" in os.environ:
    app.conf.broker_transport_options = {"visibility_timeout": float(os.environ["MILLSTREAM_VISIBILITY_TIMEOUT"])}
millstream = Millstream(
    app,
    Installation.from_environment(os.environ),
    celery_app="tests.acceptance.application:app",
    pipelines="tests.acceptance.pipelines:pipelines",
    slots=int(os.environ["MILLSTREAM_SLOTS"]),
    tick=1.0,
)


@app.task(name="tests.acceptance.echo", acks_late=True, ignore_result=True)  # type: ignore[untyped-decorator]  # Celery has no types
def echo(path: str) -> None:
    """An ordinary task of the application, beside the streams: one line a run."""
    with open(path, "a") as file:
        file.write("ran\n")
