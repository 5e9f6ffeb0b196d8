"""Leave to begin: who hands attempts over ahead of time can take back, at once and for certain, those that have not begun.

A pipe of small numbers, one for each attempt handed over, whose reading end both processes have: whoever reads a number has it. The process that runs attempts reads one before
each; the other one reads all that is left to take back as many as it gets, the last ones. It depends on no answer of a process that may stand still. What must never happen here:
an attempt that begins and is taken back.
"""

from __future__ import annotations

import os
import struct

_NUMBER = struct.Struct("<I")  # written and read whole: a pipe splits nothing so short
_LIMIT = 1 << 32


class Granter:
    """The end of whoever hands attempts over."""

    def __init__(self) -> None:
        self.reading, self._writing = os.pipe()
        os.set_blocking(self.reading, False)
        os.set_blocking(self._writing, False)
        self._number = 0
        """Another one after each taking back: what is on its way to the other process from before is known by its old one."""

    def grant(self) -> int:
        """Leave for one more attempt: the number to send with it."""
        os.write(self._writing, _NUMBER.pack(self._number))
        return self._number

    def take_back(self) -> int:
        """How many of the last attempts that were handed over will not begin."""
        count = 0
        while True:
            try:
                count += len(os.read(self.reading, 4096 * _NUMBER.size))
            except BlockingIOError:
                break
        self._number = (self._number + 1) % _LIMIT
        return count // _NUMBER.size

    def close(self) -> None:
        os.close(self.reading)
        os.close(self._writing)


class Taker:
    """The end of whoever runs them."""

    def __init__(self, reading: int) -> None:
        self._reading = reading
        self._in_hand: int | None = None

    def close(self) -> None:
        os.close(self._reading)

    def take(self, number: int) -> bool:
        """Whether the attempt that came with this number may begin. If so it has begun, for all the other side can tell."""
        if self._in_hand is None:
            try:
                read = os.read(self._reading, _NUMBER.size)
            except BlockingIOError:
                return False
            if not read:
                return False  # the other side is gone
            (self._in_hand,) = _NUMBER.unpack(read)
        if self._in_hand != number:
            return False  # leave for a later one
        self._in_hand = None
        return True
