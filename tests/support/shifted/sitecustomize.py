"""Wall clocks that are ``MILLSTREAM_TEST_CLOCK`` seconds fast, in every Python process that has this directory on PYTHONPATH, from its very start.

What Celery's beat goes by, which is no function of ``time``, is set by the application. What must never happen here: a monotonic clock that is touched.
"""

import os
import time

_seconds = int(os.environ["MILLSTREAM_TEST_CLOCK"])
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + _seconds
time.time_ns = lambda: _time_ns() + _seconds * 1_000_000_000
