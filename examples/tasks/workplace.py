"""Where an example works: the directory that ``--directory`` names, or a temporary one that is removed afterwards. Nothing here is Millstream's."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def workplace(about: str | None) -> Iterator[Path]:
    """``about``: the docstring of the example, whose first line ``--help`` shows."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--directory", type=Path, help="an empty directory to work in; without it a temporary one, removed afterwards")
    given: Path | None = parser.parse_args().directory
    if given is None:
        with tempfile.TemporaryDirectory(prefix="millstream-example-") as made:
            yield Path(made)
    else:
        given.mkdir(parents=True, exist_ok=True)
        yield given
