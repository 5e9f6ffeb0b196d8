"""A server as a child process: its ports, its directory, its life and death.

Called by :mod:`tests.support.instances`, which knows the four kinds of servers. What must never happen here: a signal to a process that
was not started here, or a server left behind. Processes are known by id *and* start time; what a killed test run left is swept by the
next one.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import fcntl
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, Self

import psutil

ROOT = Path(tempfile.gettempdir()) / f"millstream-instances-{os.getuid()}"
# Below the range Linux hands out for outgoing connections (32768 and up), so a lease cannot be taken by somebody's connect().
PORTS = range(20000, 30000)
_live: weakref.WeakSet[Instance] = weakref.WeakSet()


class InstanceFailed(RuntimeError):
    """A server did not start, or did not answer in time; the message ends with the tail of its log."""


def find_program(name: str, *places: str) -> str | None:
    """Absolute path of an executable, looked for on PATH, in the sbin directories and in ``places`` (glob patterns, newest last)."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin:/opt/homebrew/bin:/opt/homebrew/sbin")
    if found:
        return found
    hits = [p for place in places for p in sorted(Path("/").glob(place.lstrip("/") + "/" + name))]
    return str(hits[-1]) if hits else None


class PortLease:
    """A free TCP port that no other test run on this machine will pick while the lease is held."""

    def __init__(self, wanted: int | None = None) -> None:
        ROOT.mkdir(mode=0o755, exist_ok=True)
        candidates: Sequence[int] = [wanted] if wanted else [PORTS[(os.getpid() * 37 + i) % len(PORTS)] for i in range(len(PORTS))]
        for port in candidates:
            lock = (ROOT / f"port-{port}.lock").open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                continue
            if self._is_free(port):
                self.port, self._lock = port, lock
                return
            lock.close()
        raise InstanceFailed(f"no free port among {candidates[:3]}…; stop what listens there")

    @staticmethod
    def _is_free(port: int) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
        return True

    def release(self) -> None:
        """Let others pick the port. The lock file stays: removing it would let two processes lock two files of one name."""
        self._lock.close()


def _identity(pid: int) -> tuple[int, float] | None:
    try:
        return pid, psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return None


def kill_tree(pid: int, created: float) -> None:
    """SIGKILL to the process and all below it, if it still is the one that was created then; returns when they are gone."""
    if _identity(pid) != (pid, created):
        return
    parent = psutil.Process(pid)
    with contextlib.suppress(psutil.NoSuchProcess):
        _kill_all([parent, *parent.children(recursive=True)])


def _kill_all(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _await_gone(processes, 10)


def _await_gone(processes: Sequence[psutil.Process], timeout: float) -> None:
    """Until all ended. A zombie has: its new parent, process 1 of a container, may take seconds to collect it."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and any(_is_alive(p) for p in processes):
        time.sleep(0.005)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def sweep() -> None:
    """End servers whose test run is gone and remove their directories. Run before each new instance; safe beside other runs."""
    for record in ROOT.glob("*/owner.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            body = json.loads(record.read_text())
            owner = body["owner"]
            if owner is None or _identity(owner[0]) == tuple(owner):
                continue
            for pid, created in body["servers"]:
                kill_tree(pid, created)
            shutil.rmtree(record.parent, ignore_errors=True)


class Instance(abc.ABC):
    """A server process tree with durable data in a directory of its own.

    ``start`` returns when a client can log in; ``stop`` is the orderly way, ``kill`` is SIGKILL to the whole tree at once, and both keep
    the data, so ``start`` goes on with it under the same address. Leaving the context (or ``close``) kills and removes everything.
    Times are in seconds.
    """

    kind: ClassVar[str]
    account: ClassVar[str | None] = None  # the server refuses to run as root: the account it runs under then
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    start_timeout: ClassVar[float] = 60.0

    def __init__(self, *, port: int | None = None) -> None:
        sweep()
        self._leases = [PortLease(port)]
        self.port = self._leases[0].port
        self.home = Path(tempfile.mkdtemp(prefix=f"{self.kind}-", dir=ROOT))
        self.log = self.home / "server.log"
        self._account = self.account if os.getuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        self._extra: list[subprocess.Popen[bytes]] = []
        self._prepared = False
        self._owner = _identity(os.getpid())
        self._own(self.home)
        self._record()
        _live.add(self)

    @property
    @abc.abstractmethod
    def url(self) -> str:
        """Address with credentials, as SQLAlchemy or kombu take it."""

    @abc.abstractmethod
    def _prepare(self) -> None:
        """Make the data directory. Once."""

    @abc.abstractmethod
    def _command(self) -> list[str]:
        """The server in the foreground."""

    @abc.abstractmethod
    def _login(self) -> None:
        """Log in and out again; raises when that is not possible yet."""

    @property
    def pid(self) -> int:
        """Process id of the server itself."""
        return int(self._server().pid)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start, or start again with the data there is. Raises :class:`InstanceFailed` with the end of the log."""
        if self.running:
            return self
        if not self._prepared:
            self._prepare()
            self._prepared = True
        self._process = self._spawn(self._command())
        self._record()
        self._await(self._login)
        return self

    def stop(self, timeout: float = 30.0) -> None:
        """Orderly shutdown; what does not end in time is killed."""
        if not self.running:
            return
        assert self._process is not None
        tree = self._tree()
        self._server().send_signal(self.stop_signal)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            _kill_all(tree)
        _await_gone(tree, 5)

    def kill(self) -> None:
        """SIGKILL to the server and every process below it: a power cut for the software, not for the disk."""
        if self._process is not None:
            _kill_all(self._tree())
            self._process.wait(10)

    def restart(self) -> None:
        """Orderly stop and start."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        for process in self._tree():
            process.suspend()

    def resume(self) -> None:
        """SIGCONT after :meth:`pause`."""
        for process in self._tree():
            process.resume()

    def close(self) -> None:
        """Kill, remove the data, give the ports back. May be repeated."""
        self.kill()
        for helper in self._extra:
            helper.kill()
            helper.wait(10)
        self._extra.clear()
        shutil.rmtree(self.home, ignore_errors=True)
        for lease in self._leases:
            lease.release()
        _live.discard(self)

    def detach(self) -> dict[str, Any]:
        """Let the server outlive this process; the answer is what :func:`end_detached` needs to end it."""
        self._owner = None
        self._record()
        _live.discard(self)
        return {"kind": self.kind, "home": str(self.home), "servers": self._identities(), "url": self.url}

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- for the servers below

    def _server(self) -> psutil.Process:
        assert self._process is not None, f"{self.kind} was never started"
        return psutil.Process(self._process.pid)

    def _tree(self) -> list[psutil.Process]:
        if self._process is None or self._process.poll() is not None:
            return []
        top = psutil.Process(self._process.pid)
        try:
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _identities(self) -> list[tuple[int, float]]:
        started = [p.pid for p in [self._process, *self._extra] if p is not None]
        return [found for pid in started if (found := _identity(pid))]

    def _record(self) -> None:
        """Written beside the data so that a later run can sweep: whose it is, and what was started."""
        (self.home / "owner.json").write_text(json.dumps({"owner": self._owner, "servers": self._identities()}))

    def _own(self, path: Path) -> None:
        if self._account:
            entry = pwd.getpwnam(self._account)
            os.chown(path, entry.pw_uid, entry.pw_gid)
        path.chmod(0o700)

    def _environment(self) -> Mapping[str, str]:
        return {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": str(self.home), "LC_ALL": "C"}

    def _as_account(self) -> dict[str, Any]:
        if not self._account:
            return {}
        entry = pwd.getpwnam(self._account)
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": os.getgrouplist(self._account, entry.pw_gid)}

    def _spawn(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._open_log() as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.home,
                env=self._environment(),
                start_new_session=True,
                **self._as_account(),
            )

    def _run(self, command: Sequence[str]) -> None:
        with self._open_log() as log:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.home,
                env=self._environment(),
                timeout=self.start_timeout,
                **self._as_account(),
            )
        if done.returncode:
            raise InstanceFailed(f"{command[0]} ended with {done.returncode}:\n{self._log_tail()}")

    def _open_log(self) -> IO[bytes]:
        return self.log.open("ab")

    def _log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else "(no log)"

    def _await(self, answers: Callable[[], None]) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.start_timeout
        while True:
            try:
                return answers()
            except Exception as error:
                if self._process.poll() is not None:
                    raise InstanceFailed(f"{self.kind} ended with {self._process.returncode}:\n{self._log_tail()}") from error
                if time.monotonic() > deadline:
                    self.kill()
                    raise InstanceFailed(
                        f"{self.kind} did not answer in {self.start_timeout:.0f} s ({error}):\n{self._log_tail()}"
                    ) from error
            # A server that starts offers nothing to wait on; its exit does end the wait at once.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)


def end_detached(record: Mapping[str, Any]) -> None:
    """End a server that :meth:`Instance.detach` let live, and remove its data."""
    for pid, created in record["servers"]:
        kill_tree(pid, created)
    home = Path(record["home"])
    if home.parent == ROOT:
        shutil.rmtree(home, ignore_errors=True)


def live() -> Iterator[Instance]:
    """Instances of this process that are not closed yet."""
    yield from list(_live)


@atexit.register
def _close_all() -> None:
    for instance in live():
        with contextlib.suppress(Exception):
            instance.close()
