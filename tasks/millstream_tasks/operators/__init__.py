"""Operators of a chain. Each works on whole batches; per record there is the user's function and nothing else."""
