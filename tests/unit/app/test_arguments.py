"""What is typed on a command line becomes a value, or an error that names the option, the value, its unit and what is allowed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import pytest

from millstream import ConfigurationError, EdgeConfig, EdgeMode, Override, RestartPolicy, StreamSettings
from millstream.arguments import UNITS, config_of, overrides_of, settings_of

REFERENCE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "generate.py"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("retained=x", ("--setting retained is 'x'", "whole number of epochs, at least 1")),
        ("epoch_interval_ms=1.5", ("--setting epoch_interval_ms is '1.5'", "whole number of milliseconds, 0 or more")),
        ("alignment_ms=", ("--setting alignment_ms is ''", "whole number of milliseconds, at least 1")),
        ("restart.failures=many", ("--setting restart.failures is 'many'", "whole number of restarts, 0 or more")),
        ("incremental=perhaps", ("--setting incremental is 'perhaps'", "true or false")),
    ],
)
def test_a_setting_of_the_wrong_kind_is_named_with_value_unit_and_range(text: str, told: tuple[str, ...]) -> None:
    """No name of a Python type."""
    with pytest.raises(ConfigurationError) as found:
        settings_of([text])
    assert [t for t in told if t not in str(found.value)] == []
    assert "`" not in str(found.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("count.parallelism=x", ("--override count.parallelism is 'x'", "whole number of subtasks, at least 1")),
        ("count.capacity=lots", ("--override count.capacity is 'lots'", "whole number of envelopes")),
        ("count.codec=xml", ("--override count.codec is 'xml'", "msgpack or json")),
        ("count.compression=gzip", ("--override count.compression is 'gzip'", "zstd or null")),
        ("count.mode=fast", ("--override count.mode is 'fast'", "BLOCKING_QUEUE or CREDIT_BASED")),
    ],
)
def test_an_override_of_the_wrong_kind_is_named_with_value_unit_and_range(text: str, told: tuple[str, ...]) -> None:
    """The operator stands in it too."""
    with pytest.raises(ConfigurationError) as found:
        overrides_of([text])
    assert [t for t in told if t not in str(found.value)] == []


def test_what_is_right_is_taken() -> None:
    """Numbers, switches and choices, of the job, its restarts and its edges."""
    settings = settings_of(["retained=7", "incremental=false", "restart.kind=fixed", "restart.failures=0", "checkpoints=/srv/c"])
    assert settings == StreamSettings(retained=7, incremental=False, restart=RestartPolicy(kind="fixed", failures=0), checkpoints="/srv/c")
    found = overrides_of(["a.b.parallelism=3", "a.b.capacity=2", "c.mode=CREDIT_BASED", "c.compression=zstd", "d.parallelism=1"])
    assert found == {
        "a.b": Override(3, {"capacity": 2}),
        "c": Override(None, {"mode": EdgeMode.CREDIT_BASED, "compression": "zstd"}),
        "d": Override(1, None),
    }


def test_the_units_in_errors_are_those_of_the_reference() -> None:
    """Each whole number of settings, restarts and edges; milliseconds by its name."""
    spec = importlib.util.spec_from_file_location("docs_generate", REFERENCE)
    assert spec is not None and spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    tables: Mapping[type, Mapping[str, tuple[str, str]]] = {
        StreamSettings: reference.SETTINGS,
        RestartPolicy: reference.RESTART,
        EdgeConfig: reference.EDGE,
    }
    numbers = {name: texts[name][0] for of, texts in tables.items() for name in texts if type(getattr(of(), name)) is int}
    assert {n: u for n, u in numbers.items() if not n.endswith("_ms")} == UNITS
    assert {u for n, u in numbers.items() if n.endswith("_ms")} == {"ms"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", ("a JSON array, not an object", "--config '{")),
        ("null", ("a JSON null, not an object",)),
        ("@none.json", ("--config @none.json", "/none.json cannot be read", "No such file")),
        ("there.json", ("there.json names a file", "--config @there.json")),
        ("@binary", ("not UTF-8 text",)),
        ("{size: 1}", ("--config is not JSON", "line 1 column 2")),
    ],
)
def test_a_config_that_is_missing_or_no_object_is_told_as_what_it_is(
    text: str, told: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is not there is another thing than an empty list; the file is named with its directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.json").write_text("{}")
    (tmp_path / "binary").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigurationError) as found:
        config_of(text)
    assert [t for t in told if t not in str(found.value)] == []


def test_no_config_is_not_an_empty_one() -> None:
    """What is left out stays as it was when a job is resumed."""
    assert (config_of(None), config_of("{}"), config_of('{"a": [1]}')) == (None, {}, {"a": [1]})
