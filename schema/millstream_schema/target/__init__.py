"""Databases that a job writes to: one door to DB-API drivers, their dialects, and every statement that sinks and SQL snapshots execute.

Called by the SQL sinks, sources and snapshot storage. Subtask processes load this and no SQL toolkit; nothing is imported here, and a
driver only when a URL asks for it.
"""
