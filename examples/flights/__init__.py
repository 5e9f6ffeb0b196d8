"""Flights of New York, 2013: event-time windows over real, badly ordered data.

- ``python -m examples.flights`` (``make demo``): embedded, two node processes on this machine, one killed, one subtask stopped.
- ``celery -A examples.flights worker`` and ``beat``: the same job on Celery workers.
"""
