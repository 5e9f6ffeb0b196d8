"""``manage.py millstream …``: Millstream's command line on the database that the settings name. Called by Django. What must never happen here: a second way of reading settings."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.core.management.base import BaseCommand

from millstream.cli import main


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    """All arguments are Millstream's own."""

    help = "Millstream's command line, e.g. manage.py millstream up"
    requires_system_checks: list[str] = []  # noqa: RUF012  # Django's own form

    def run_from_argv(self, argv: list[str]) -> None:
        config = apps.get_app_config("millstream")
        installation = config.installation()
        own: list[Any] = [
            "--database",
            installation.database,
            "--prefix",
            installation.prefix,
            "--namespace",
            config.given().get("NAMESPACE", "default"),
        ]
        main(args=[*own, *argv[2:]], prog_name="manage.py millstream")
