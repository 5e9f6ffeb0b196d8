"""The SQL store: the only place that talks to Millstream's own tables.

``database`` opens transactions and maps errors, ``tables`` describes, one module per row kind holds the statements, one named function each. What must never
happen here: a decision, or a write that does not name the state or the fence it was decided from.
"""
