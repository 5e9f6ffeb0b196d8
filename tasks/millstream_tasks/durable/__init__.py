"""Durable tasks on a worker: which to claim, when to begin and settle them, and what a lost lease means. User code runs in a pool behind a port."""
