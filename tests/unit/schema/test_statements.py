"""With which words statements begin, for what must not be executed in a transaction of ours."""

from __future__ import annotations

import pytest

from millstream_schema.store.statements import beginnings, ends_transaction

ALL = ("sqlite", "postgresql", "mysql")
CASES: list[tuple[str, tuple[str, ...], list[str]]] = [
    ("SELECT 1", ALL, ["SELECT"]),
    ("(((select 1)))", ALL, ["SELECT"]),
    ("", ALL, []),
    (" ; -- nothing\n;", ALL, []),
    ("/* COMMIT */ SELECT 1", ALL, ["SELECT"]),
    ("-- COMMIT\nSELECT 1 -- ; COMMIT", ALL, ["SELECT"]),
    ("/* x */ COMMIT", ALL, ["COMMIT"]),
    ("\f\v\n(/* x */ COMMIT", ALL, ["COMMIT"]),
    ("SELECT 1;\nCOMMIT;", ALL, ["SELECT", "COMMIT"]),
    ("SELECT '; COMMIT'", ALL, ["SELECT"]),
    ("SELECT 'it''s; COMMIT'; ROLLBACK", ALL, ["SELECT", "ROLLBACK"]),
    ('SELECT "a;b""c" ; END', ALL, ["SELECT", "END"]),
    ("SELECT '/*'; COMMIT --'*/", ALL, ["SELECT", "COMMIT"]),
    ("SELECT '--' ; COMMIT", ALL, ["SELECT", "COMMIT"]),
    ("SELECT 1 /* never closed ; COMMIT", ALL, ["SELECT"]),
    ("SELECT 'never closed ; COMMIT", ALL, ["SELECT"]),
    ("SELECT `a;b`; COMMIT", ("sqlite", "mysql"), ["SELECT", "COMMIT"]),
    ("SELECT [a;b]; COMMIT", ("sqlite",), ["SELECT", "COMMIT"]),
    ("# x\nCOMMIT", ("mysql",), ["COMMIT"]),
    ("SELECT 1 # 2; COMMIT", ("postgresql",), ["SELECT", "COMMIT"]),
    ("SELECT 1--2; COMMIT", ("mysql",), ["SELECT", "COMMIT"]),
    ("/*! COMMIT */", ("mysql",), ["COMMIT"]),
    ("/*!50000 COMMIT */", ("mysql",), ["COMMIT"]),
    ("/*M!100100 ROLLBACK */", ("mysql",), ["ROLLBACK"]),
    ("SELECT 'a\\'; COMMIT'", ("mysql",), ["SELECT"]),
    ("SELECT 'a\\'; COMMIT", ("sqlite", "postgresql"), ["SELECT", "COMMIT"]),
    ("SELECT E'a\\'; COMMIT'", ("postgresql",), ["SELECT"]),
    ("SELECT $$; COMMIT; $$; END", ("postgresql",), ["SELECT", "END"]),
    ("SELECT $a$ $$; $b$ COMMIT; $a$; END", ("postgresql",), ["SELECT", "END"]),
    ("SELECT a$1; COMMIT; SELECT b$1", ("postgresql",), ["SELECT", "COMMIT", "SELECT"]),
    ("/* a /* b */ COMMIT */ SELECT 1", ("postgresql",), ["SELECT"]),
    ("/* a /* b */ COMMIT", ("sqlite", "mysql"), ["COMMIT"]),
    ("CREATE TRIGGER t AFTER INSERT ON a BEGIN SELECT CASE 1 WHEN 1 THEN 2 END; DELETE FROM b; END; COMMIT", ("sqlite",), ["CREATE", "COMMIT"]),
    ("CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT CASE 1 WHEN 1 THEN 2 END; SELECT 2; END; COMMIT", ("postgresql",), ["CREATE", "COMMIT"]),
    ("CREATE TABLE t (begin int); COMMIT", ("postgresql",), ["CREATE", "COMMIT"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "dialects", "words"), CASES, ids=[text for text, *_ in CASES])
def test_each_statement_of_a_text_is_known_by_its_first_word(text: str, dialects: tuple[str, ...], words: list[str]) -> None:
    """Comments, quotes and bodies hide nothing that is executed, and nothing in them is taken for a statement."""
    for dialect in dialects:
        assert [found[0] for found in beginnings(text, dialect)] == words, dialect


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("COMMIT", True), ("commit work", True), ("ABORT", True), ("PREPARE TRANSACTION 'x'", True), ("START /* x */ TRANSACTION", True),
        ("ROLLBACK TO SAVEPOINT a", False), ("ROLLBACK WORK /* x */ TO a", False), ("SAVEPOINT a", False), ("PREPARE a AS SELECT 1", False), ("ROLLBACK -- TO a", True),
    ],
)  # fmt: skip
def test_savepoints_are_no_end(text: str, ends: bool) -> None:
    """What goes back to one stays in the transaction."""
    (words,) = beginnings(text, "postgresql")
    assert ends_transaction(words) is ends
