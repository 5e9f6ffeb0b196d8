"""Text that only this installation can have made: cursors of pages and tokens of bulk acts, signed with keys derived from its secret.

Pure. What must never happen here: a text that was changed in any bit taken for one of ours; a secret or a key in a text or a message.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import TypeVar

import msgspec

from ..errors import TokenRefused

_MAC = 20
"""Bytes of the signature."""
_LONGEST = 4_000
P = TypeVar("P", bound=msgspec.Struct)


class Seal:
    """Signs values of one purpose. ``secret``: the installation's; ``purpose`` parts the keys: a token of one kind is none of another."""

    def __init__(self, secret: str, purpose: str) -> None:
        self._key = hmac.digest(secret.encode(), f"millstream {purpose}".encode(), hashlib.sha256)
        self._purpose = purpose

    def close(self, value: msgspec.Struct) -> str:
        """The value as text that can be given out."""
        body = msgspec.msgpack.encode(value)
        return base64.urlsafe_b64encode(self._mac(body) + body).decode().rstrip("=")

    def open(self, text: str, kind: type[P]) -> P:
        """What :meth:`close` made. Raises TokenRefused for anything else."""
        refused = TokenRefused(f"this is no {self._purpose} of this installation, or it was changed on its way: begin without it")
        if len(text) > _LONGEST or not text.isascii():
            raise refused
        try:
            data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        except (binascii.Error, ValueError):
            raise refused from None
        if base64.urlsafe_b64encode(data).decode().rstrip("=") != text:
            raise refused  # the same bytes spelled otherwise
        mac, body = data[:_MAC], data[_MAC:]
        if not hmac.compare_digest(mac, self._mac(body)):
            raise refused
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except msgspec.DecodeError:
            raise TokenRefused(f"this {self._purpose} was made by another version of Millstream: begin without it") from None

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, hashlib.sha256)[:_MAC]
