"""Complete lines of a byte stream, with the exact byte offset of the next one that was not consumed.

Called by the record formats (:mod:`.file_formats`) on behalf of a file reader. What must never happen here: a byte that belongs to no
line or to two lines, whatever the chunk size and wherever a chunk ends; memory that grows with one endless line.
"""

from __future__ import annotations

from collections.abc import Callable

BOM = b"\xef\xbb\xbf"
KEPT_OF_A_LONG_LINE = 1024


class LineBuffer:
    """Lines (without ``\\n``) from ``read(size)``, which stands at ``offset``.

    Lines over ``max_line`` bytes are not kept: :meth:`long_line` tells of them. With ``stop``, only lines that *start* below
    that offset are seen. ``strip_bom`` drops a UTF-8 byte order mark at offset 0 from the first line, not from the offsets.
    """

    def __init__(
        self,
        read: Callable[[int], bytes],
        *,
        offset: int,
        chunk: int,
        max_line: int,
        stop: int | None = None,
        strip_bom: bool = False,
    ) -> None:
        self._read = read
        # A chunk of at most max_line bytes: only a line that spans chunks can then be too long.
        self._chunk = max(1, min(chunk, max_line))
        self._max = max_line
        self._stop = stop
        self._strip_bom = strip_bom
        self.offset = offset
        """Byte offset of the next line."""
        self.records = 0
        """Records consumed since the buffer was made, as its callers count them."""
        self._lines: list[bytes] = []
        self._at = 0
        self._long: dict[int, int] = {}  # index in _lines -> true length
        self._tail: list[bytes] = []
        self._tail_size = 0
        self._tail_start = offset
        self._unterminated = False
        self._bom = 0
        self._eof = stop is not None and offset >= stop

    def peek(self, limit: int) -> list[bytes]:
        """Up to ``limit`` next lines that are here, ending before one that is too long."""
        stop = self._at + limit
        if self._long:
            stop = min(stop, min(self._long))
        return self._lines[self._at : stop]

    def line(self, index: int) -> bytes | None:
        """The ``index``-th line from here (the kept beginning of one that is too long), read if need be; None past the end."""
        while self._at + index >= len(self._lines):
            if not self.fill():
                return None
        return self._lines[self._at + index]

    def long_line(self, index: int = 0) -> int | None:
        """True length in bytes of the ``index``-th line when it is too long, else None."""
        return self._long.get(self._at + index)

    def consume(self, lines: int, records: int) -> None:
        """Move past ``lines`` lines, which were ``records`` records."""
        batch = self._lines[self._at : self._at + lines]
        size = sum(map(len, batch)) + len(batch)
        if self._long:
            for index in range(self._at, self._at + lines):
                if (true := self._long.pop(index, None)) is not None:
                    size += true - len(self._lines[index])
        self._at += lines
        if self._bom:
            size, self._bom = size + self._bom, 0
        if self._unterminated and self._at == len(self._lines):
            size -= 1
        self.offset += size
        self.records += records

    def fill(self) -> bool:
        """Read one chunk. False when there is nothing more and every line is in the buffer."""
        if self._eof:
            return False
        if self._at:
            del self._lines[: self._at]
            self._long = {index - self._at: size for index, size in self._long.items()}
            self._at = 0
        data = self._read(self._chunk)
        if not data:
            self._end()
            return True
        cut = data.rfind(b"\n")
        if cut < 0:
            self._keep(data)
            return True
        lines = data[:cut].split(b"\n")
        self._add(lines, self._tail_size + cut + 1)
        self._tail, self._tail_size = [], 0
        if cut + 1 < len(data) and not self._eof:
            self._keep(data[cut + 1 :])
        return True

    def _keep(self, data: bytes) -> None:
        """Data of a line whose end has not come; beyond the limit only its beginning is kept."""
        self._tail.append(data)
        self._tail_size += len(data)
        if self._tail_size > self._max and len(self._tail) > 1:
            self._tail = [b"".join(self._tail)[:KEPT_OF_A_LONG_LINE]]

    def _add(self, lines: list[bytes], size: int) -> None:
        """Take over complete lines that fill ``size`` bytes; the first continues the tail."""
        first = len(self._lines)
        true = self._tail_size + len(lines[0])
        if self._tail:
            lines[0] = b"".join(self._tail) + lines[0]
        if true > self._max:
            lines[0] = lines[0][:KEPT_OF_A_LONG_LINE]
            self._long[first] = true
        if self._stop is not None and self._tail_start + size >= self._stop:
            lines = self._owned(lines, true, self._stop)
        if self._strip_bom and self._tail_start == 0 and lines and first not in self._long and lines[0].startswith(BOM):
            lines[0] = lines[0][len(BOM) :]
            self._bom = len(BOM)
        self._tail_start += size
        self._lines += lines

    def _owned(self, lines: list[bytes], true_first: int, stop: int) -> list[bytes]:
        """Those of ``lines`` that start below ``stop``; the rest belongs to the next range."""
        self._eof = True
        start = self._tail_start
        for index, line in enumerate(lines):
            if start >= stop:
                return lines[:index]
            start += (true_first if index == 0 else len(line)) + 1
        return lines

    def _end(self) -> None:
        """The input is over: what is left is a last line without its newline."""
        self._eof = True
        line = b"".join(self._tail)
        self._tail = []
        if self._strip_bom and self._tail_start == 0 and line.startswith(BOM):
            if line == BOM:
                self.offset += len(BOM)
                return
            self._bom, line = len(BOM), line[len(BOM) :]
        if not line:
            return
        self._unterminated = True
        if self._tail_size > self._max:
            line, self._bom = line[:KEPT_OF_A_LONG_LINE], 0
            self._long[len(self._lines)] = self._tail_size
        self._lines.append(line)
