"""Durable tasks: their states, records and pure decisions. The statements that carry them out are in :mod:`millstream_schema.store`."""
