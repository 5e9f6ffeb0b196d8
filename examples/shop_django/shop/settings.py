"""Settings of the shop. Orders and tasks are in one database."""

from pathlib import Path

BASE = Path(__file__).resolve().parent.parent
SECRET_KEY = "only for this example"
DEBUG = True
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
ROOT_URLCONF = "shop.urls"
INSTALLED_APPS = ["millstream.django", "shop"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(BASE / "data" / "millstream.db")}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
MILLSTREAM = {"HANDLERS": "shop.tasks.handlers", "CELERY": "shop.celery.millstream"}
