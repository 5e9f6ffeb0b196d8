"""Small programs, one for each thing durable tasks are used for: see README.md. ``tests/integration/test_task_examples.py`` runs each and compares what it prints."""
