"""``docker-compose.yml`` starts what exists: modules, volumes, services, health checks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from tests.support.sources import ROOT

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def _words(service: dict[str, Any]) -> list[str]:
    command = service.get("command", [])
    return command.split() if isinstance(command, str) else list(command)


def test_the_whole_platform_is_there() -> None:
    """Schema migration, broker, cache, database, two workers, beat and Flower."""
    assert set(SERVICES) == {"rabbitmq", "redis", "postgres", "worker-1", "worker-2", "beat", "flower", "migrate"}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_command_names_modules_that_exist(name: str) -> None:
    """What follows ``-A`` and ``-m`` is a module of this repository, also in the health check."""
    check = SERVICES[name].get("healthcheck", {"test": []})["test"]
    words = [*_words(SERVICES[name]), *(part for text in check for part in text.split())]
    modules = [words[i + 1] for i, word in enumerate(words[:-1]) if word in ("-A", "--app", "-m")]
    assert modules or name in ("rabbitmq", "redis", "postgres", "flower", "migrate")
    for module in modules:
        path = ROOT.joinpath(*module.split("."))
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), f"{name} runs {module}, which does not exist"


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_can_be_waited_for_and_restarts(name: str) -> None:
    """Each has a health check, restarts, may open many files, and waits only for services that exist."""
    service = SERVICES[name]
    if name == "migrate":  # it ends by itself; the others wait for its success
        assert service["restart"] == "on-failure"
        return
    assert service["healthcheck"]["test"]
    assert service["restart"] == "unless-stopped"
    assert service["ulimits"]["nofile"]["soft"] >= 20_000
    assert set(service.get("depends_on", {})) <= set(SERVICES)


@pytest.mark.parametrize("name", ["rabbitmq", "redis", "postgres"])
def test_servers_keep_their_data_in_named_volumes(name: str) -> None:
    """Truth outlives the container, and the image has a version."""
    mounts = [volume.split(":")[0] for volume in SERVICES[name]["volumes"]]
    assert mounts
    assert set(mounts) <= set(COMPOSE["volumes"])
    assert re.fullmatch(r"[a-z]+:\d+(\.\d+)*", SERVICES[name]["image"])


def test_both_workers_share_their_checkpoints() -> None:
    """A subtask that moves to the other worker finds its state there."""
    first, second = (SERVICES[name]["volumes"] for name in ("worker-1", "worker-2"))
    assert first == second == ["checkpoints:/var/lib/millstream/checkpoints"]


def test_no_secret_is_written_down() -> None:
    """Passwords come from the environment, with defaults that say what they are."""
    text = (ROOT / "docker-compose.yml").read_text()
    written = [line.strip() for line in text.splitlines() if re.search(r"(?i)pass(word)?\b.*:", line) and not line.strip().startswith("#")]
    assert written
    assert [line for line in written if "${" not in line] == []


def test_the_image_holds_every_source_root_and_the_pinned_versions() -> None:
    """The image is built from the five rooms and the tested versions, and does not run as root."""
    lines = SERVICES["worker-1"]["build"]["dockerfile_inline"].splitlines()
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    assert {"schema", "tasks", "coordinator", "flower", "app", "examples", "constraints.txt", "pyproject.toml"} <= copied
    assert all((ROOT / name).exists() for name in copied)
    assert any("--constraint constraints.txt" in line for line in lines)
    assert lines[-1] == "USER millstream"
