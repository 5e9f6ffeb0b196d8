"""Checkpoint storages: ``files`` (a shared directory) and ``sql`` (a database). Opened by the node for its subtasks.

Nothing is imported here, so that a subtask loads only the storage it uses.
"""
