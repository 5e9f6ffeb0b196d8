"""The Celery application of the shop: ``celery -A celery_app worker``, ``celery -A celery_app beat``."""

import os

from celery import Celery

from millstream import Installation, Millstream

app = Celery("shop", broker=os.environ.get("SHOP_BROKER", "redis://127.0.0.1:6379/0"))

installation = Installation(
    database=os.environ.get("MILLSTREAM_DATABASE", "postgresql+psycopg://shop@127.0.0.1/shop"),
    transport=os.environ.get("MILLSTREAM_TRANSPORT", "redis://127.0.0.1:6379/1"),
    checkpoints=os.environ.get("MILLSTREAM_CHECKPOINTS", "file:///srv/shop/checkpoints"),
)
millstream = Millstream(app, installation, celery_app="celery_app:app", pipelines="orders:pipelines", slots=4)
