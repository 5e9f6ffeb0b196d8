"""Where staged output lies, and how a sealed part of it is named and summed up. Shared by every sink that commits by epoch.

Called by the writers of the collect, file and SQL append sinks. What must never happen here: an identity computed from the *present* job,
generation or table. A committable carries where its data lies, and that is where it is looked for, by whoever commits it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from millstream_schema.connectors import CommitAnswer, CommitResult, Committable, ConnectorContext, Json
from millstream_schema.errors import ConfigurationError, SinkError

# What becomes of a committable whose staging is gone and which is not known to be committed: FAILED, or taken as committed with a warning.
Missing = Literal["fail", "warn"]
MISSING: tuple[Missing, ...] = ("fail", "warn")
_MAX_NAME = 190


class Segment(NamedTuple):
    """``{job}/{operator}/{subtask}/{generation}/{n}``: where data lies from one barrier to the next."""

    job: str
    operator: str
    subtask: int
    generation: int
    n: int

    @classmethod
    def first(cls, context: ConnectorContext) -> Segment:
        """The first segment of a subtask. Raises :class:`ConfigurationError` for names that targets cannot hold."""
        for what, name in (("job", context.job), ("operator", context.operator)):
            if not name or len(name) > _MAX_NAME:
                raise ConfigurationError(
                    f"the {what} name {name[:40]!r}… cannot be used with this sink: give it 1 to {_MAX_NAME} characters"
                )
        return cls(context.job, context.operator, context.subtask, context.generation, 1)

    @classmethod
    def of(cls, committable: Committable) -> Segment:
        """The segment a committable names. Raises :class:`SinkError` when its body is of another kind of sink."""
        body = committable.body
        job, generation, n = body.get("job"), body.get("generation"), body.get("n")
        if not isinstance(job, str) or not isinstance(generation, int) or not isinstance(n, int):
            raise SinkError(
                f"committable {committable.id} was sealed by another kind of sink (its body has {sorted(body)}); restore with that sink"
            )
        return cls(job, committable.operator, committable.subtask, generation, n)

    def next(self) -> Segment:
        """The segment that is open after this one was sealed."""
        return self._replace(n=self.n + 1)

    def seal(self, epoch: int, rows: int, checksum: str, **body: Json) -> Committable:
        """The committable of ``epoch`` over this segment."""
        identity = f"{self.job}:{self.operator}:{self.subtask}:{epoch}"
        where: dict[str, Json] = {"job": self.job, "generation": self.generation, "n": self.n}
        return Committable(identity, self.operator, self.subtask, epoch, rows, checksum, {**where, **body})

    def left_behind(self, context: ConnectorContext) -> bool:
        """Whether this is an older generation's staging that falls to ``context`` to delete."""
        mine = (self.job, self.operator) == (context.job, context.operator) and self.subtask % context.parallelism == context.subtask
        return mine and self.generation < context.generation


class Chunk(NamedTuple):
    """One staged part of a segment."""

    seq: int
    records: int
    checksum: str


def digest(data: bytes) -> str:
    """BLAKE2b-128 of one chunk, in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def checksum_of(chunks: Iterable[Chunk]) -> str:
    """Checksum of a segment: over the checksums of its chunks, their sizes and their order."""
    return digest(";".join(f"{chunk.seq}:{chunk.records}:{chunk.checksum}" for chunk in chunks).encode())


class Answers:
    """The answer for a group of committables: stops at the first that is not committed, so that order is kept."""

    def __init__(self) -> None:
        self.answer = CommitAnswer(CommitResult.ALREADY_COMMITTED)

    def add(self, one: CommitAnswer) -> bool:
        """Take one committable's answer; False when the group ends here."""
        if one.result not in (CommitResult.COMMITTED, CommitResult.ALREADY_COMMITTED):
            self.answer = one
            return False
        result = CommitResult.COMMITTED if CommitResult.COMMITTED in (one.result, self.answer.result) else CommitResult.ALREADY_COMMITTED
        self.answer = CommitAnswer(result, "; ".join(filter(None, (self.answer.detail, one.detail))))
        return True


def missing_answer(committable: Committable, missing: Missing, place: str) -> CommitAnswer:
    """The answer for a committable whose staging is gone without a trace of a commit."""
    detail = f"{committable.id}: its {committable.rows} staged rows are not in {place} and no marker says they were committed"
    if missing == "warn":
        return CommitAnswer(CommitResult.ALREADY_COMMITTED, f"{detail}; taken as committed because of missing='warn'")
    return CommitAnswer(CommitResult.FAILED, f"{detail}; if the loss is acceptable run the job with missing='warn' on this sink")


def missing_problems(missing: str, name: str) -> list[str]:
    """What is wrong with a ``missing`` argument."""
    return [] if missing in MISSING else [f"{name}: missing must be 'fail' or 'warn', not {missing!r}"]


def column_problems(columns: Sequence[str], name: str) -> list[str]:
    """What is wrong with a list of columns, apart from the spelling of each."""
    if not columns:
        return [f"{name}: columns is empty; name the columns to write"]
    repeated = sorted({column for column in columns if columns.count(column) > 1})
    return [f"{name}: columns names {', '.join(repeated)} more than once"] if repeated else []
