"""The four carriers of stream edges, all behind :class:`millstream_schema.channels.Transport`.

Called by whoever assembles a subtask; nothing is imported here, so that a build without ``redis`` or ``amqp`` can still
use the other carriers. What must never happen here: a carrier that bounds a channel by refusing or dropping frames.

Which one:

=================================  ===================  =====================================================================
where the two subtasks run         carrier              needs
=================================  ===================  =====================================================================
threads of one process             ``memory``           one :class:`~.memory.MemoryBroker` shared by all its transports
processes of one machine           ``unix``             a runtime directory both may enter; no broker
machines, Redis is at hand         ``redis``            Redis >= 6.2 with ``maxmemory-policy noeviction``; lowest latency
machines, RabbitMQ is at hand      ``rabbitmq``         RabbitMQ with classic queues; survives longer outages of one side,
                                                        spills to disk, stalls (not fails) on its memory alarm
=================================  ===================  =====================================================================

All four keep the same promises (``tests/contract/channels``): frames arrive in the order they were put, repeats may occur
and are the caller's to drop, ``capacity`` bounds what a reader is handed ahead of what it reported as processed, a lost
connection is an error on both ends and nobody reconnects behind the caller's back. They differ in one point: a unix channel
lives and dies with its consumer (its socket), the others stay until they are deleted or expire.
"""
