"""Millstream's public names: exactly-once stream jobs and durable tasks on the Celery, Redis/RabbitMQ and SQL you already run.

Imported by users, and by every subtask process through the user's module of pipelines. A name is resolved when it is first asked for (PEP 562), so that
``from millstream import Pipelines, FileSource`` costs what these two cost. What must never happen here: an import that drags SQLAlchemy, Celery or a broker's client
into a process that did not ask for it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream_schema.connectors import (
        CheckpointParticipant,
        CommitAnswer,
        CommitResult,
        Committable,
        CommittingWriter,
        ConnectorContext,
        Handle,
        PoisonPolicy,
        Read,
        Sink,
        SinkCapability,
        SinkWriter,
        SnapshotStorage,
        Source,
        SourceCapability,
        Split,
        SplitReader,
        Truncatable,
    )
    from millstream_schema.durable.finding import TaskFilter
    from millstream_schema.durable.requests import Options
    from millstream_schema.durable.states import TaskState
    from millstream_schema.errors import (
        ChannelBroken,
        ChannelError,
        ChannelLost,
        ChannelMissing,
        CodecError,
        CommitUnknown,
        ConfigurationError,
        DeliveryNotFound,
        ExternalRefused,
        Fenced,
        FingerprintMismatch,
        ForeignSession,
        JobConflict,
        JobFailed,
        JobInvalid,
        JobNotFound,
        KeyRefused,
        MillstreamError,
        OperatorError,
        PermitNotFound,
        QuotaExceeded,
        RecordError,
        RestoreRefused,
        RetryTransaction,
        ReviewConflict,
        ScheduleInvalid,
        ScheduleNotFound,
        SchemaMismatch,
        SinkError,
        SnapshotMissing,
        SnapshotUnreadable,
        SourceError,
        SourceUnavailable,
        StorageError,
        StorageUnavailable,
        StoreError,
        StoreUnavailable,
        SubscriptionConflict,
        SubscriptionNotFound,
        TaskConflict,
        TaskFailed,
        TaskInvalid,
        TaskNotFound,
        TokenRefused,
        TransactionRefused,
        TransactionTooLong,
        UnknownFactory,
        UnknownFormat,
        UnknownHandler,
        UnknownQueue,
    )
    from millstream_schema.model import EdgeConfig, EdgeMode, Guarantee, Override, Partitioning
    from millstream_schema.settings import RestartPolicy, StreamSettings
    from millstream_schema.states import JobState
    from millstream_tasks.durable.answers import Done, Intent, NotDone, OutcomeUnknown
    from millstream_tasks.durable.context import TaskContext
    from millstream_tasks.durable.verbs import Cancel, Fail, NeedsReview, Retry, Snooze
    from millstream_tasks.operators.keyed_state import AggregatingState, ListState, MapState, OperatorListState, ReducingState, ValueState
    from millstream_tasks.operators.process import Context, ProcessFunction
    from millstream_tasks.operators.window_base import Window
    from millstream_tasks.sinks.files import FileSink
    from millstream_tasks.sinks.memory import CollectSink, CollectTarget, PrintSink
    from millstream_tasks.sinks.sql import SqlAppendSink
    from millstream_tasks.sinks.upsert import SqlUpsertSink
    from millstream_tasks.sources.files import FileSource
    from millstream_tasks.sources.memory import CollectionSource, GeneratorSource
    from millstream_tasks.sources.rabbitmq_queue import RabbitQueueSource
    from millstream_tasks.sources.redis_streams import RedisStreamSource
    from millstream_tasks.sources.sql import SqlKeySource

    from .builder import DataStream, JobBuilder, KeyedStream, WindowedStream
    from .client import Jobs
    from .embedded import EmbeddedCluster
    from .handlers import Handlers
    from .inbox import Inbox
    from .installation import Installation
    from .joining import TaskReceipt, enlist
    from .outbox import Outbox, OutboxReceipt, OutboxRelay
    from .pipelines import Pipelines
    from .queues import Permits, Queues
    from .results import TaskResult
    from .schedules import Schedules
    from .subscriptions import Delivery, Subscriptions
    from .task_worker import TaskWorker
    from .tasks import Item, Refusal, Tasks
    from .worker import Millstream

__version__ = importlib.metadata.version("millstream")

_HOMES = {
    "millstream.builder": "DataStream JobBuilder KeyedStream WindowedStream",
    "millstream.client": "Jobs",
    "millstream.embedded": "EmbeddedCluster",
    "millstream.handlers": "Handlers",
    "millstream.inbox": "Inbox",
    "millstream.installation": "Installation",
    "millstream.joining": "TaskReceipt enlist",
    "millstream.outbox": "Outbox OutboxReceipt OutboxRelay",
    "millstream.pipelines": "Pipelines",
    "millstream.queues": "Permits Queues",
    "millstream.results": "TaskResult",
    "millstream.schedules": "Schedules",
    "millstream.subscriptions": "Delivery Subscriptions",
    "millstream.task_worker": "TaskWorker",
    "millstream.tasks": "Item Refusal Tasks",
    "millstream.worker": "Millstream",
    "millstream_schema.connectors": (
        "CheckpointParticipant CommitAnswer CommitResult Committable CommittingWriter ConnectorContext Handle PoisonPolicy Read "
        "Sink SinkCapability SinkWriter SnapshotStorage Source SourceCapability Split SplitReader Truncatable"
    ),
    "millstream_schema.durable.finding": "TaskFilter",
    "millstream_schema.durable.requests": "Options",
    "millstream_schema.durable.states": "TaskState",
    "millstream_schema.errors": (
        "ChannelBroken ChannelError ChannelLost ChannelMissing CodecError CommitUnknown ConfigurationError DeliveryNotFound "
        "ExternalRefused Fenced FingerprintMismatch ForeignSession JobConflict JobFailed JobInvalid JobNotFound KeyRefused MillstreamError "
        "OperatorError PermitNotFound QuotaExceeded RecordError RestoreRefused RetryTransaction ReviewConflict ScheduleInvalid ScheduleNotFound "
        "SchemaMismatch SinkError SnapshotMissing "
        "SnapshotUnreadable SourceError SourceUnavailable StorageError StorageUnavailable StoreError StoreUnavailable "
        "SubscriptionConflict SubscriptionNotFound TaskConflict TaskFailed TaskInvalid TaskNotFound TokenRefused "
        "TransactionRefused TransactionTooLong UnknownFactory UnknownFormat UnknownHandler UnknownQueue"
    ),
    "millstream_schema.model": "EdgeConfig EdgeMode Guarantee Override Partitioning",
    "millstream_schema.settings": "RestartPolicy StreamSettings",
    "millstream_schema.states": "JobState",
    "millstream_tasks.durable.answers": "Done Intent NotDone OutcomeUnknown",
    "millstream_tasks.durable.context": "TaskContext",
    "millstream_tasks.durable.verbs": "Cancel Fail NeedsReview Retry Snooze",
    "millstream_tasks.operators.keyed_state": "AggregatingState ListState MapState OperatorListState ReducingState ValueState",
    "millstream_tasks.operators.process": "Context ProcessFunction",
    "millstream_tasks.operators.window_base": "Window",
    "millstream_tasks.sinks.files": "FileSink",
    "millstream_tasks.sinks.memory": "CollectSink CollectTarget PrintSink",
    "millstream_tasks.sinks.sql": "SqlAppendSink",
    "millstream_tasks.sinks.upsert": "SqlUpsertSink",
    "millstream_tasks.sources.files": "FileSource",
    "millstream_tasks.sources.memory": "CollectionSource GeneratorSource",
    "millstream_tasks.sources.rabbitmq_queue": "RabbitQueueSource",
    "millstream_tasks.sources.redis_streams": "RedisStreamSource",
    "millstream_tasks.sources.sql": "SqlKeySource",
}
_NAMES = {name: (module, name) for module, names in _HOMES.items() for name in names.split()}
"""Public name → where it lives: (module, attribute)."""

__all__ = [
    "AggregatingState",
    "Cancel",
    "ChannelBroken",
    "ChannelError",
    "ChannelLost",
    "ChannelMissing",
    "CheckpointParticipant",
    "CodecError",
    "CollectSink",
    "CollectTarget",
    "CollectionSource",
    "CommitAnswer",
    "CommitResult",
    "CommitUnknown",
    "Committable",
    "CommittingWriter",
    "ConfigurationError",
    "ConnectorContext",
    "Context",
    "DataStream",
    "Delivery",
    "DeliveryNotFound",
    "Done",
    "EdgeConfig",
    "EdgeMode",
    "EmbeddedCluster",
    "ExternalRefused",
    "Fail",
    "Fenced",
    "FileSink",
    "FileSource",
    "FingerprintMismatch",
    "ForeignSession",
    "GeneratorSource",
    "Guarantee",
    "Handle",
    "Handlers",
    "Inbox",
    "Installation",
    "Intent",
    "Item",
    "JobBuilder",
    "JobConflict",
    "JobFailed",
    "JobInvalid",
    "JobNotFound",
    "JobState",
    "Jobs",
    "KeyRefused",
    "KeyedStream",
    "ListState",
    "MapState",
    "Millstream",
    "MillstreamError",
    "NeedsReview",
    "NotDone",
    "OperatorError",
    "OperatorListState",
    "Options",
    "Outbox",
    "OutboxReceipt",
    "OutboxRelay",
    "OutcomeUnknown",
    "Override",
    "Partitioning",
    "PermitNotFound",
    "Permits",
    "Pipelines",
    "PoisonPolicy",
    "PrintSink",
    "ProcessFunction",
    "Queues",
    "QuotaExceeded",
    "RabbitQueueSource",
    "Read",
    "RecordError",
    "RedisStreamSource",
    "ReducingState",
    "Refusal",
    "RestartPolicy",
    "RestoreRefused",
    "Retry",
    "RetryTransaction",
    "ReviewConflict",
    "ScheduleInvalid",
    "ScheduleNotFound",
    "Schedules",
    "SchemaMismatch",
    "Sink",
    "SinkCapability",
    "SinkError",
    "SinkWriter",
    "SnapshotMissing",
    "SnapshotStorage",
    "SnapshotUnreadable",
    "Snooze",
    "Source",
    "SourceCapability",
    "SourceError",
    "SourceUnavailable",
    "Split",
    "SplitReader",
    "SqlAppendSink",
    "SqlKeySource",
    "SqlUpsertSink",
    "StorageError",
    "StorageUnavailable",
    "StoreError",
    "StoreUnavailable",
    "StreamSettings",
    "SubscriptionConflict",
    "SubscriptionNotFound",
    "Subscriptions",
    "TaskConflict",
    "TaskContext",
    "TaskFailed",
    "TaskFilter",
    "TaskInvalid",
    "TaskNotFound",
    "TaskReceipt",
    "TaskResult",
    "TaskState",
    "TaskWorker",
    "Tasks",
    "TokenRefused",
    "TransactionRefused",
    "TransactionTooLong",
    "Truncatable",
    "UnknownFactory",
    "UnknownFormat",
    "UnknownHandler",
    "UnknownQueue",
    "ValueState",
    "Window",
    "WindowedStream",
    "__version__",
    "enlist",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for, once."""
    try:
        module, attribute = _NAMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
