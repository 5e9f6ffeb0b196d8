import os

from celery import Celery

from millstream import Installation, Millstream

app = Celery("shop", broker="redis://127.0.0.1:6379/0")
app.conf.worker_send_task_events = True  # what `celery worker --events` switches on: Flower shows the subtasks

installation = Installation(
    database=os.environ.get("SHOP_DATABASE", "postgresql+psycopg://shop@127.0.0.1/shop"),
    transport="redis://127.0.0.1:6379/1",
    checkpoints="file:///srv/shop/checkpoints",
)
millstream = Millstream(app, installation, celery_app="celery_app:app", pipelines="orders:pipelines", slots=4)
