"""A small simulated job for tests of one situation each: no random faults, everything by hand.

Used by ``test_traps_*.py``. What must never happen here: an assertion on how often something was recovered; only on what is visible and what the rows say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from tests.simulation.base import NO_LIMIT
from tests.simulation.workloads import Rolling

from millstream.testing.actors import SimChild
from millstream.testing.simulation import SETTINGS, Faults
from millstream_schema.manifest import EpochManifest
from millstream_schema.settings import StreamSettings
from millstream_schema.store import epochs
from millstream_schema.store.rows import EpochRow, JobRow


class Scene(Rolling):
    """The rolling count, shorter, with settings that a test chooses."""

    name = "scene"
    splits = 3
    per_split = 100
    rate = 20.0

    def __init__(self, seed: int = 0, faults: Faults | None = None, **settings: Any) -> None:
        self.settings_changed = settings
        super().__init__(seed, faults or Faults())

    def tuned(self, settings: StreamSettings) -> StreamSettings:
        return msgspec.structs.replace(settings, **{"restart": NO_LIMIT, **self.settings_changed})

    # -- looking -------------------------------------------------------------------------------------------------------------------------

    @property
    def row(self) -> JobRow:
        return self.sim.job(self.job)

    def epoch_rows(self) -> list[EpochRow]:
        """All epochs, oldest first."""
        return list(reversed(self.sim.database.read(lambda tx: epochs.list_epochs(tx, self.job, 10_000))))

    def manifest(self, epoch: int | None = None) -> EpochManifest:
        wanted = epoch or self.row.newest_durable
        return self.sim.database.read(lambda tx: epochs.read_manifest(tx, self.job, wanted))

    def children(self, vertex: str = "") -> list[SimChild]:
        """Subtasks of the present generation that are alive, by id."""
        found = [c for n in self.sim.nodes for c in n.children if not c.dead and c.runner.deployment.generation == self.row.generation]
        return sorted((c for c in found if c.runner.subtask.vertex.startswith(vertex)), key=lambda c: c.runner.subtask.id)

    def visible(self) -> Counter[Any]:
        return Counter(self.target.values("out"))

    def before(self, manifest: EpochManifest) -> Counter[Any]:
        """What the records before the offsets of an epoch give."""
        return self.counts({s.split_id: s.cursor for s in manifest.splits})

    # -- driving -------------------------------------------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
        self.sim.run_until(condition, seconds, what)

    def until_durable(self, epoch: int) -> None:
        self.until(lambda: self.row.newest_durable >= epoch, f"epoch {epoch} durable")

    def until_committed(self, epoch: int) -> None:
        self.until(lambda: self.row.newest_committed >= epoch, f"epoch {epoch} committed")

    def complete(self) -> None:
        """To the end, with the whole result."""
        self.finish()
        self.final()


__all__ = ["SETTINGS", "Scene"]
