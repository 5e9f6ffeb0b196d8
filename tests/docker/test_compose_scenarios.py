"""The flights job in containers, by the images, commands and variables of ``docker-compose.yml``: a worker or a broker is killed, and the result is equal.

Run by ``make test-docker`` only, with a Docker daemon. What must never happen here: a second description of what the compose file says, or pytest-celery imported by
any other module (with ordinary tests it takes the place of their fixtures).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from examples.flights.jobs import pipelines
from examples.flights.prepare import unpack
from examples.flights.reference import SELECT, answer, difference
from pytest_celery import (  # type: ignore[import-untyped]
    CeleryTestNode,
    CeleryTestWorker,
    CeleryWorkerCluster,
    CeleryWorkerContainer,
    RabbitMQContainer,
    RabbitMQTestBroker,
    RedisContainer,
    RedisTestBroker,
)
from pytest_docker_tools import build, container, fxtr, network, volume  # type: ignore[import-untyped]
from tests.support import services
from tests.support.celery_cluster import ROOT, eventually, settings

from millstream import Installation, Jobs

pytestmark = [pytest.mark.docker, pytest.mark.filterwarnings("default")]  # what the Docker client leaves open is not ours
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SHARED = "/var/lib/millstream/checkpoints"
TABLE_DIRECTORY = f"{SHARED}/flights"
PACE_US = 2_000
"""Pause per record: half a minute of reading, so that there is something to break."""


def plain(value: Any) -> Any:
    """A value of the compose file with ``${NAME:-default}`` replaced by its default."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) if isinstance(value, str) else value


def address(node: Any) -> str:
    """The name under which other containers of the network reach this one."""
    return str(node.attrs["Config"]["Hostname"])


@pytest.fixture(scope="session")
def daemon() -> None:
    """Skip by name, or fail in CI, when no Docker daemon answers."""
    cli = shutil.which("docker")
    if cli is not None and subprocess.run([cli, "info"], capture_output=True, timeout=60).returncode == 0:
        return
    message = "DOCKER IS ABSENT: `docker info` finds no daemon"
    if services.in_ci():
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


@pytest.fixture(scope="session")
def docker_client(daemon: None, docker_client: Any) -> Iterator[Any]:
    """The client of pytest-docker-tools, closed at the end."""
    yield docker_client
    docker_client.close()


@pytest.fixture(scope="session")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the Dockerfile copies, and nothing else of this directory; the Dockerfile beside it."""
    directory = tmp_path_factory.mktemp("context")
    lines: str = SERVICES["worker-1"]["build"]["dockerfile_inline"]
    (directory / "Dockerfile").write_text(lines)
    for name in {word for line in lines.splitlines() if line.startswith("COPY") for word in line.split()[1:-1]}:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, directory / name)
    return directory


image = build(path="{context}", tag="millstream-example:test", rm=True)
flights_network = network()
checkpoints = volume()
rabbitmq = container(
    image=SERVICES["rabbitmq"]["image"],
    environment=plain(SERVICES["rabbitmq"]["environment"]),
    ports={"5672/tcp": None},
    network="{flights_network.name}",
    wrapper_class=RabbitMQContainer,
    timeout=120,
)
redis = container(
    image=SERVICES["redis"]["image"],
    command=plain(SERVICES["redis"]["command"]),
    ports={"6379/tcp": None},
    network="{flights_network.name}",
    wrapper_class=RedisContainer,
    timeout=120,
)
postgres = container(
    image=SERVICES["postgres"]["image"],
    command=SERVICES["postgres"]["command"],
    environment=plain(SERVICES["postgres"]["environment"]),
    ports={"5432/tcp": None},
    network="{flights_network.name}",
    timeout=120,
)


@pytest.fixture
def environment(rabbitmq: Any, redis: Any, postgres: Any) -> dict[str, str]:
    """The compose file's variables of the application, with the addresses that these containers have."""
    found: dict[str, str] = plain(COMPOSE["x-app"]["environment"])
    for host, node in {"rabbitmq": rabbitmq, "redis": redis, "postgres": postgres}.items():
        found = {name: value.replace(f"@{host}:", f"@{address(node)}:") for name, value in found.items()}
    return found


@pytest.fixture
def prepared(docker_client: Any, image: Any, environment: dict[str, str], flights_network: Any, checkpoints: Any) -> str:
    """Where the workers find the table: the schema is up, the sink's table made, the month unpacked on the shared volume. The network's servers answer."""

    def run(*command: str) -> str:
        output: bytes = docker_client.containers.run(
            image.id, list(command), environment=environment, network=flights_network.name, volumes={checkpoints.name: {"bind": SHARED}}, remove=True
        )  # fmt: skip
        return output.decode()

    eventually("the schema is up", lambda: run(*SERVICES["migrate"]["command"]) or True)
    return run("python", "-m", "examples.flights.prepare", environment["MILLSTREAM_DATABASE"], TABLE_DIRECTORY).strip()


@pytest.fixture
def worker_environment(environment: dict[str, str], prepared: str) -> dict[str, str]:
    """What a worker is started with, once everything it needs is there."""
    return environment


def worker() -> Any:
    """A fixture: one worker of the compose file."""
    return container(
        image="{image.id}",
        command=SERVICES["worker-1"]["command"],
        environment=fxtr("worker_environment"),
        network="{flights_network.name}",
        volumes={"{checkpoints.name}": {"bind": SHARED}},
        init=SERVICES["worker-1"]["init"],
        wrapper_class=CeleryWorkerContainer,
        timeout=120,
    )


first_worker, second_worker = worker(), worker()


@pytest.fixture
def cluster(first_worker: CeleryWorkerContainer, second_worker: CeleryWorkerContainer) -> Iterator[CeleryWorkerCluster]:
    """Both workers."""
    workers = CeleryWorkerCluster(CeleryTestWorker(first_worker, None), CeleryTestWorker(second_worker, None))
    assert workers.ready()
    yield workers
    workers.teardown()


@pytest.fixture
def database(postgres: Any, environment: dict[str, str]) -> str:
    """URL of the database as this machine reaches it."""
    host, port = postgres.get_addr("5432/tcp")
    return environment["MILLSTREAM_DATABASE"].replace(f"@{address(postgres)}:5432", f"@{host}:{port}")


@pytest.fixture
def jobs(environment: dict[str, str], database: str, cluster: CeleryWorkerCluster) -> Iterator[Jobs]:
    """Operations on the jobs of these workers."""
    with Jobs(Installation.from_environment({**environment, "MILLSTREAM_DATABASE": database}), pipelines) as found:
        yield found


@pytest.fixture
def victims(cluster: CeleryWorkerCluster, rabbitmq: Any, redis: Any) -> dict[str, Callable[[], CeleryTestNode]]:
    """What can be killed, by name."""
    return {
        "worker": lambda: cluster[0],
        "rabbitmq": lambda: RabbitMQTestBroker(rabbitmq),
        "redis": lambda: RedisTestBroker(redis),
    }


@pytest.mark.parametrize("victim", ["worker", "rabbitmq", "redis"])
def test_flights_are_equal_whatever_container_is_killed(
    docker_client: Any,
    jobs: Jobs,
    victims: dict[str, Callable[[], CeleryTestNode]],
    prepared: str,
    environment: dict[str, str],
    database: str,
    tmp_path: Path,
    victim: str,
) -> None:
    """SIGKILL of a worker's container, of Celery's broker or of the channels': the job goes on when it is back, and the sink is equal to the answer computed apart."""
    target = environment["MILLSTREAM_DATABASE"].replace("+psycopg", "")
    config: dict[str, Any] = {"path": prepared, "target": target, "pace_us": PACE_US}
    job = jobs.submit("flights", config=config, settings=settings(source_batch=20)).id
    eventually("epochs are durable", lambda: jobs.find(job).newest_durable >= 2, timeout=120)
    assert not jobs.find(job).state.ended, "the job ended before anything was broken: raise PACE_US"
    node = victims[victim]()
    node.kill()
    killed = docker_client.containers.get(node.container.id)
    eventually("the container is gone", lambda: killed.reload() or killed.status == "exited")
    killed.start()  # node.restart() waits for half a minute and then gives up
    newest = jobs.find(job).next_epoch - 1
    eventually("a later epoch is durable", lambda: jobs.find(job).newest_durable > newest, timeout=180)
    assert jobs.wait(job, timeout=300).state == "FINISHED"
    with psycopg.connect(database.replace("+psycopg", "")) as connection:
        rows: list[Any] = connection.execute(SELECT).fetchall()
    assert difference(rows, answer(unpack(tmp_path))) == []
