"""What a node keeps of the subtasks it hosts: each child and what it was told, and the reports that wait for the database.

Used by :class:`millstream_tasks.node.Node`, which decides when; nothing here looks at a clock or starts a process. What must never happen here: a
report lost because the database was away.
"""
