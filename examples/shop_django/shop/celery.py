"""The project's Celery application: ``celery -A shop.celery worker``."""

import os

from celery import Celery

from millstream import Installation, Millstream

from .settings import BASE

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
app = Celery("shop", broker=os.environ.get("SHOP_BROKER", "redis://127.0.0.1:6379/0"))
app.config_from_object("django.conf:settings", namespace="CELERY")
millstream = Millstream(app, Installation.local(BASE / "data"), celery_app="shop.celery:app", handlers="shop.tasks:handlers")
