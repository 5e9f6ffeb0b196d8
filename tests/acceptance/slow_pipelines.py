"""The jobs of the acceptance tests in a module that takes long to import in a subtask process, as one does that imports a machine-learning framework."""

from __future__ import annotations

import sys
import time

from tests.acceptance.pipelines import pipelines

SECONDS = 3.0
if sys.argv[0].endswith("subtask_main.py"):
    time.sleep(SECONDS)

__all__ = ["SECONDS", "pipelines"]
