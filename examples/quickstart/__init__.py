"""The small examples that the README and the documentation show. ``tests/integration/test_docs.py`` runs each of them."""
