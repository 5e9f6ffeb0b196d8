"""Durable tasks in a Django project: ``INSTALLED_APPS = [..., "millstream.django"]`` and the setting ``MILLSTREAM``.

::

    with transaction.atomic():
        order = Order.objects.create(...)
        confirm.delay(order.id)          # there if, and only if, the order is

Imported by users' projects; needs the extra ``[django]``. What must never happen here: a task that is kept although the block around it was rolled back; a block of another
database joined.
"""

from __future__ import annotations

from .atomic import transactions
from .current import tasks

__all__ = ["tasks", "transactions"]
