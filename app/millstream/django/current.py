"""The project's client, from the application's configuration.

Called by users' views and models. What must never happen here: a client made at import.
"""

from __future__ import annotations

from django.apps import apps

from ..tasks import Tasks


def tasks() -> Tasks:
    """``Tasks`` as ``settings.MILLSTREAM`` describes them. Submissions join the transaction that is open on the setting's alias."""
    found: Tasks = apps.get_app_config("millstream").tasks.client
    return found
