"""With which words the statements of a text begin: past comments, parentheses and quoted text, however many statements it holds.

Used by what refuses statements that would end a transaction of ours. It reads as far as that needs and knows no grammar. What must never happen here: a word that the
database would execute and that is taken for a comment or for quoted text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

WORDS = 4
"""So many of each statement are told."""
_WORD = r"[^\W\d][\w$]*"
_PLAIN = re.compile(_WORD)
_COMMON = {
    "name": r'"(?:[^"]|"")*"?',
    "text": r"'(?:[^']|'')*'?",
    "word": _WORD,
    "end": ";",
}
_WITH_BACKSLASH = r"(?:[^{0}\\]|\\.|{0}{0})*{0}?"
_LINE = r"--[^\n]*"
_BLOCK = r"/\*(?:.*?\*/|.*)"


def _pattern(parts: dict[str, str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?P<{name}>{part})" for name, part in parts.items()), re.DOTALL)


_TOKENS = {
    "sqlite": _pattern({"comment": f"{_LINE}|{_BLOCK}", "ticked": "`[^`]*`?", "bracketed": r"\[[^\]]*\]?", **_COMMON}),
    "postgresql": _pattern({
        "comment": _LINE,
        "nested": r"/\*",
        "escaped": "[eE]'" + _WITH_BACKSLASH.format("'"),
        "dollars": r"(?<![\w$])\$(?P<tag>(?:[^\W\d]\w*)?)\$(?:.*?\$(?P=tag)\$|.*)",
        **_COMMON,
    }),
    "mysql": _pattern({
        # What stands in /*! … */ and /*M! … */ is executed: only its ends are passed over.
        "opening": r"/\*M?!\d*",
        "comment": rf"--(?=\s|$)[^\n]*|\#[^\n]*|{_BLOCK}",
        "ticked": "`[^`]*`?",
        **_COMMON,
        "name": '"' + _WITH_BACKSLASH.format('"'),
        "text": "'" + _WITH_BACKSLASH.format("'"),
    }),
}  # fmt: skip
_SEVERAL = re.compile(r"[;#]|--|/\*")
_NEST = re.compile(r"/\*|\*/")


def beginnings(text: str, dialect: str) -> list[list[str]]:
    """The first words of each statement, in capitals; none for one without any. The body of a trigger or a function is part of the statement that makes it."""
    if not _SEVERAL.search(text):
        words = [found.group().upper() for found, _ in zip(_PLAIN.finditer(text), range(WORDS), strict=False)]
        return [words] if words else []
    found: list[list[str]] = [[]]
    at, depth, before = 0, 0, ""
    while token := _TOKENS[dialect].search(text, at):
        at = token.end()
        kind = token.lastgroup
        if kind == "nested":
            at = _past_nested(text, at)
        elif kind == "end" and not depth:
            found.append([])
        elif kind == "word":
            word = token.group().upper()
            if len(found[-1]) < WORDS:
                found[-1].append(word)
            if found[-1][0] == "CREATE":
                depth = max(0, depth + _deeper(word, before, depth, dialect))
            before = word
    return [words for words in found if words]


def _deeper(word: str, before: str, depth: int, dialect: str) -> int:
    """Whether a word of a statement that makes something begins or ends a body, or something in it that ends with the same word."""
    if word == ("ATOMIC" if dialect == "postgresql" else "BEGIN"):
        return 1 if dialect != "postgresql" or before == "BEGIN" else 0
    if not depth:
        return 0
    return {"CASE": 1, "END": -1}.get(word, 0)


def _past_nested(text: str, at: int) -> int:
    """The end of a comment that may hold others."""
    depth = 1
    while depth and (found := _NEST.search(text, at)):
        depth += 1 if found.group() == "/*" else -1
        at = found.end()
    return len(text) if depth else at


def ends_transaction(words: Sequence[str]) -> bool:
    """Whether a statement that begins so ends the transaction it is in, or begins another."""
    if words[:2] == ["PREPARE", "TRANSACTION"]:
        return True
    return words[0] in ("COMMIT", "ROLLBACK", "BEGIN", "START", "END", "ABORT") and "TO" not in words[1:3]
