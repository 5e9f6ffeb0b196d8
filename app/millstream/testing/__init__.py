"""Honest fakes and the simulator: the same contract suites run against these and the real ones."""
