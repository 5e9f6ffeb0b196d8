"""The application's configuration: reads ``settings.MILLSTREAM``, gives the handlers their client.

::

    MILLSTREAM = {
        "HANDLERS": "shop.tasks.handlers",       # a millstream.Handlers
        "ALIAS": "default",                      # whose database is the installation's, and whose transactions submissions join
        "CELERY": "shop.celery.millstream",      # optional: the millstream.Millstream of the project, which wakes the workers
        "NAMESPACE": "default",
    }

Further keys are the fields of ``Installation`` in capitals: ``DATABASE`` (if Millstream is to use another address of the same database), ``PREFIX``, ``LEASE_MS`` …
What must never happen here: a database opened while Django starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.utils.module_loading import import_string

from millstream_schema.errors import ConfigurationError

from ..frameworks import FrameworkTasks, installation_of
from ..handlers import Handlers
from ..installation import VARIABLES, Installation
from .atomic import transactions, url_of

_OWN = {"HANDLERS", "ALIAS", "CELERY", "NAMESPACE"}


class MillstreamConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """``millstream.django`` in INSTALLED_APPS."""

    name = "millstream.django"
    label = "millstream"
    verbose_name = "Millstream"

    def ready(self) -> None:
        given = self.given()
        unknown = sorted(set(given) - _OWN - {name.upper() for name in VARIABLES})
        if unknown:
            raise ConfigurationError(
                f"settings.MILLSTREAM has unknown keys {', '.join(unknown)}: known are {', '.join(sorted(_OWN))} and the fields of Installation"
            )
        handlers = _named(given, "HANDLERS") or Handlers()
        if not isinstance(handlers, Handlers):
            raise ConfigurationError("settings.MILLSTREAM['HANDLERS'] must name a millstream.Handlers")
        self.tasks = FrameworkTasks(
            self.installation, handlers, str(given.get("NAMESPACE", "default")), lambda: transactions(self.alias)(), _named(given, "CELERY")
        )

    @property
    def alias(self) -> str:
        return str(self.given().get("ALIAS", "default"))

    def given(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = getattr(settings, "MILLSTREAM", {})
        return found

    def installation(self) -> Installation:
        """As the settings say at this moment: under Django's tests a database has another name."""
        given = {name.lower(): value for name, value in self.given().items() if name not in _OWN}
        return installation_of(given, url_of(self.alias))


def _named(given: Mapping[str, Any], key: str) -> Any:
    """An object, or what its dotted path names; a colon before the attribute will do, too."""
    value = given.get(key)
    return import_string(value.replace(":", ".")) if isinstance(value, str) else value
