"""The sinks that ship: ``memory`` (collect, print), ``files``, ``sql`` (append) and ``upsert``.

Built by users, opened by the subtask runner. Nothing is imported here, so that a subtask loads only the sink it uses.
"""
