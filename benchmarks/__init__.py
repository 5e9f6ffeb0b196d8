"""Benchmarks: ``python -m benchmarks`` or ``make bench``. See README.md for what is measured and how."""
