"""What is told of a database that is there and cannot be used."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from millstream.opened import reachable
from millstream_schema.errors import StoreError, StoreUnavailable

URL = sa.make_url("postgresql+psycopg://ann:secret@db/shop")
ADVICE = "its owner can GRANT"


@pytest.mark.parametrize(
    "said", ["InsufficientPrivilege: permission denied for table x", "OperationalError: (1142, \"SELECT command denied to user 'ann'\")"]
)
def test_a_missing_permission_says_what_the_owner_has_to_grant(said: str) -> None:
    """The first thing that happens on a server whose schema belongs to somebody else."""
    with pytest.raises(StoreError, match=ADVICE) as told, reachable(URL):
        raise StoreError(said)
    assert not isinstance(told.value, StoreUnavailable) and "secret" not in str(told.value)
    with pytest.raises(StoreError, match=ADVICE), reachable(URL):
        raise sa.exc.ProgrammingError("CREATE TABLE x", {}, Exception(said))
