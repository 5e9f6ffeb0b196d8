"""The step machine of one subtask: what arrives goes in, what is to be done comes out.

:class:`~millstream_tasks.runner.subtask.SubtaskRunner` is driven by a thread, by a process or by the simulator; all three run this code.
"""
