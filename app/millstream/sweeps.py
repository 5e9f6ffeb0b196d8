"""What every coordinator does for durable tasks by looking, in its order. Whichever process holds the lease does all of it.

Used by worker, task and node processes and by embedded mode. What must never happen here: a process that takes the lease and leaves a part out.
"""

from __future__ import annotations

from millstream_coordinator.delivery_sweep import DeliverySweep, NoPublisher, Publisher
from millstream_coordinator.retention_sweep import RetentionSweep
from millstream_coordinator.sweeping import Sweeps
from millstream_coordinator.task_sweep import TaskSweep
from millstream_schema.ports import Chance, Clock, Ids
from millstream_schema.store.database import Database


def task_sweeps(database: Database, clock: Clock, chance: Chance, ids: Ids, lease_ms: int, publisher: Publisher | None = None) -> Sweeps:
    """``publisher``: the broker's door, where there is one."""
    return Sweeps(
        TaskSweep(database, clock, chance, lease_ms, lease_ms // 10),
        DeliverySweep(database, clock, chance, ids, publisher or NoPublisher()),
        RetentionSweep(database, clock),
    )
