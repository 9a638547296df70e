"""The processes of a run over several hosts: how they find each other, and what happens when one is gone.

    follower -> leader   hello, alive, stop, bye
    leader -> follower   welcome or refused, the calls of `runtime.shared_learner`, alive, end

Process 0 is the leader: it has the run folder and decides everything. The others are followers: each has a share of
the learner and makes the calls it is told to make. A compiled call over all hosts may wait for ever for one that is
gone, so a thread on either side watches the connections, and ends its process if nothing else does. Who may join knows
a secret, `TOKEN`; JAX's own channels have none, so they belong into a network that is trusted.
"""

import atexit
import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import AuthenticationError, ProcessError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge, wait
from typing import Any

from sao_jax.runtime import wire
from sao_jax.runtime.signals import Interrupted

TOKEN = "SAO_TOKEN"  # an environment variable, the same on every host
EXIT_LOST = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong with the run, start it again with --resume
START_S = 300.0  # for all hosts to come
GREETING_S = 10.0  # for one that has connected to say who it is
ALIVE_S = 2.0  # between two signs of life
SILENCE_S = 60.0  # without any, a host counts as gone: it may be frozen, or cut off
GRACE_S = 20.0  # for the main thread to end the process, once a host is gone
GOODBYE_S = 10.0  # for followers to finish what they were told, at the end


class HostLost(Exception):
    """One of the hosts is gone, and with it this process's reason to go on."""

    exit_code = EXIT_LOST


def parse_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--coordinator is {text!r}; it takes HOST:PORT, for example 10.0.0.1:4300")
    return host.strip("[]"), int(port)


def free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def token() -> bytes:
    if not os.environ.get(TOKEN):
        raise ValueError(f"--coordinator needs a secret, the same on every host, in the environment variable {TOKEN}")
    return os.environ[TOKEN].encode()


def join_jax(address: str, count: int, index: int) -> None:
    """Makes this process one of `count` that JAX computes with together; before anything touches a backend."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM for itself
    # Bound to this address only: JAX's default is every interface of the machine.
    jax.distributed.initialize(
        address, count, index, coordinator_bind_address=address, initialization_timeout=int(START_S)
    )
    jax.devices()  # all processes have to ask at about the same time


def leave_jax() -> None:
    """Waits for the other processes to do the same."""
    import jax

    with contextlib.suppress(RuntimeError):
        jax.distributed.shutdown()


class _End:
    """One process's end of its connections: messages from several threads, and signs of life both ways."""

    def __init__(self, connections: dict[int, Connection]):
        self._connections, self._sending = connections, threading.Lock()
        for connection in connections.values():  # also in the middle of a message
            _limit_silence(connection, SILENCE_S)
        self._heard = dict.fromkeys(connections, time.monotonic())

    def start(self) -> None:
        """Begins to listen; nothing is received before."""
        for number, work in enumerate((self._listen, self._stay_alive)):
            threading.Thread(target=work, name=f"hosts {number}", daemon=True).start()

    def tell(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """To every one at the other end; that one of them is gone is for the listening thread to say."""
        with self._sending:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    wire.send(connection, kind, payload, **fields)

    def _stay_alive(self) -> None:
        while True:
            time.sleep(ALIVE_S)
            self.tell("alive")

    def _listen(self) -> None:
        present = dict(self._connections)
        while present:
            ready = wait(list(present.values()), ALIVE_S)
            for index in list(present):
                try:
                    if present[index] in ready:
                        message, payload = wire.receive(present[index])
                        self._heard[index] = time.monotonic()
                        self._heed(index, message, payload)
                    elif time.monotonic() - self._heard[index] > SILENCE_S:
                        del present[index]
                        self._gone(index, f"no sign of life for {SILENCE_S:g} s")
                except BlockingIOError:
                    del present[index]
                    self._gone(index, f"no sign of life for {SILENCE_S:g} s")
                except (EOFError, OSError, ValueError):
                    del present[index]
                    self._gone(index, "its connection is closed")

    def _heed(self, index: int, message: dict, payload: bytes) -> None:
        raise NotImplementedError

    def _gone(self, index: int, reason: str) -> None:
        raise NotImplementedError


class Leader(_End):
    """Process 0's end: `tell` the followers, and `check()` between calls whether they all are there.

    As a context it tells them to end, and turns what JAX raises when a host is gone into `HostLost`.
    """

    def __init__(self, connections: dict[int, Connection]):
        super().__init__(connections)
        self._lost: str | None = None
        self._signum = 0
        self._left: set[int] = set()
        self._changed = threading.Event()

    def check(self) -> None:
        """Raises HostLost, or Interrupted if a follower was asked to stop."""
        if self._lost is not None:
            raise HostLost(self._lost)
        if self._signum:
            raise Interrupted(self._signum)

    def _heed(self, index: int, message: dict, payload: bytes) -> None:
        if message["kind"] == "stop":
            self._signum = int(message["signum"])
        elif message["kind"] == "bye":
            self._left.add(index)
            self._changed.set()

    def _gone(self, index: int, reason: str) -> None:
        if index in self._left or self._lost is not None:
            return
        self._lost = f"host {index} is gone ({reason}); start all again with --resume"
        self._changed.set()
        threading.Thread(target=_end_by_force, args=(self._lost, GRACE_S, EXIT_LOST), daemon=True).start()

    def __enter__(self) -> "Leader":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        # JAX raises these when a collective fails, perhaps before the end of the connection has been seen.
        failed = isinstance(error, ValueError | RuntimeError)
        if failed:
            self._until(lambda: self._lost is not None, 1.0)
        exit_code = 0 if error is None else getattr(error, "exit_code", 1)
        if self._lost is None:
            self.tell("end", exit_code=exit_code)
            self._until(lambda: self._lost is not None or self._left == self._connections.keys(), GOODBYE_S)
        if self._left == self._connections.keys():
            leave_jax()
        else:  # JAX's own end waits for all hosts, and aborts if they do not come
            atexit.register(_end_now, EXIT_LOST if self._lost is not None else exit_code)
        if self._lost is not None and failed:
            raise HostLost(self._lost) from error

    def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and (left := deadline - time.monotonic()) > 0:
            self._changed.wait(left)
            self._changed.clear()


class Follower(_End):
    """A follower's end: `commands()` in the order in which the leader told them."""

    def __init__(self, connection: Connection, index: int):
        super().__init__({0: connection})
        self.exit_code = 1
        self._ended = False
        self._name = f"host {index}"
        self._commands: queue.SimpleQueue = queue.SimpleQueue()

    def commands(self, requested: Callable[[], int] = lambda: 0) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Until the leader ends the run. `requested()`: a signal that asks to stop, which is for the leader to do."""
        told = False
        while True:
            if (signum := requested()) and not told:
                self.tell("stop", signum=signum)
                told = True
            try:
                message, payload = self._commands.get(timeout=0.2)
            except queue.Empty:
                continue
            if message["kind"] == "end":
                self.exit_code = message["exit_code"]
                return
            yield message, payload

    def leave(self) -> None:
        """All that was told is done."""
        self.tell("bye")

    def _heed(self, index: int, message: dict, payload: bytes) -> None:
        if message["kind"] == "alive":
            return
        self._commands.put((message, payload))
        if message["kind"] == "end":  # a call that waits for other hosts may never return
            self._ended = True
            code = int(message["exit_code"])
            threading.Thread(target=_end_by_force, args=(None, GOODBYE_S, code or EXIT_LOST), daemon=True).start()

    def _gone(self, index: int, reason: str) -> None:
        if not self._ended:
            _end_by_force(f"{self._name}: the leader is gone ({reason})", 0.0, EXIT_LOST)


def _end_now(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_by_force(line: str | None, after_s: float, code: int) -> None:
    time.sleep(after_s)
    if line is not None:
        with contextlib.suppress(OSError):
            os.write(2, f"stopped: {line}\n".encode())
    os._exit(code)


# -- the beginning -----------------------------------------------------------------------------------------------------


def lead(
    address: tuple[str, int], count: int, arguments: Sequence[str], check: Callable[[], None], **welcome
) -> Leader:
    """Waits for the followers 1..count-1, which have to be started with the same arguments; tells them `welcome`."""
    secret = token()
    try:
        listener = Listener(address, backlog=count)  # whoever comes is asked for the secret on a thread of its own
    except OSError as error:
        raise ValueError(f"--coordinator {address[0]}:{address[1]}: {error.strerror or error}") from None
    arrivals: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_accept, args=(listener, secret, arrivals), daemon=True).start()
    hosts: dict[int, Connection] = {}
    deadline = time.monotonic() + START_S
    while len(hosts) < count - 1:
        check()
        if time.monotonic() > deadline:
            missing = ", ".join(str(index) for index in range(1, count) if index not in hosts)
            raise HostLost(f"host {missing} has not come within {START_S:g} s")
        with contextlib.suppress(queue.Empty):
            connection, hello = arrivals.get(timeout=0.2)
            if problem := _unfit(hello, hosts, count, arguments):
                wire.send(connection, "refused", reason=problem)
                raise ValueError(problem)
            hosts[hello["index"]] = connection
    listener.close()
    leader = Leader(hosts)
    leader.tell("welcome", **welcome)
    leader.start()
    return leader


def _accept(listener: Listener, secret: bytes, arrivals: queue.SimpleQueue) -> None:
    while True:
        try:
            connection = listener.accept()
        except ConnectionError:
            continue  # it has gone again
        except OSError:
            return  # closed: all have come
        threading.Thread(target=_greet, args=(connection, secret, arrivals), daemon=True).start()


def _greet(connection: Connection, secret: bytes, arrivals: queue.SimpleQueue) -> None:
    """Asks one that has connected for the secret and takes its hello; one that is silent holds up nobody else."""
    late = threading.Timer(GREETING_S, _shut, (connection,))
    late.daemon = True
    late.start()
    try:
        deliver_challenge(connection, secret)
        answer_challenge(connection, secret)
        _send_at_once(connection)
        hello, _ = wire.receive(connection)
    except (ProcessError, EOFError, OSError, ValueError):
        connection.close()  # some other program: it is refused, and the hosts are waited for
    else:
        late.cancel()
        late.join()
        arrivals.put((connection, hello))
    late.cancel()


def _shut(connection: Connection) -> None:
    """Ends a read that another thread is in, which closing the descriptor would not."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as handle:
        handle.shutdown(socket.SHUT_RDWR)


def _unfit(hello: dict, hosts: dict, count: int, arguments: Sequence[str]) -> str:
    index = hello.get("index")
    if not isinstance(index, int) or not 1 <= index < count or index in hosts:
        return f"a host joined as --host-index {index}; it is taken already, or not below --num-hosts {count}"
    if hello.get("arguments") != list(arguments):
        return f"host {index} was started with other flags than host 0"
    if hello.get("versions") != _versions():
        return f"host {index} has other versions than host 0: {hello.get('versions')}, not {_versions()}"
    return ""


def follow(
    address: tuple[str, int], index: int, arguments: Sequence[str], check: Callable[[], None]
) -> tuple[Follower, dict[str, Any]]:
    """Joins the leader; returns this end of the connection and what it was welcomed with."""
    secret, deadline = token(), time.monotonic() + START_S
    while True:
        check()
        try:
            connection = _joined(address, secret)
            break
        except BlockingIOError:
            raise HostLost(f"the leader at {address[0]}:{address[1]} does not answer") from None
        except AuthenticationError:
            raise ValueError(f"the leader at {address[0]}:{address[1]} has another secret in {TOKEN}") from None
        except OSError as error:  # it may not have begun to listen
            if time.monotonic() > deadline:
                raise HostLost(f"no leader at {address[0]}:{address[1]}: {error.strerror or error}") from None
            time.sleep(0.2)
    _send_at_once(connection)
    wire.send(connection, "hello", index=index, arguments=list(arguments), versions=_versions())
    try:
        while not connection.poll(0.2):  # until all the others have come
            check()
            if time.monotonic() > deadline + START_S:
                raise HostLost(f"the leader at {address[0]}:{address[1]} does not answer")
        message, _ = wire.receive(connection)
    except (EOFError, OSError):
        raise HostLost("the leader is gone") from None
    if message["kind"] == "refused":
        raise ValueError(message["reason"])
    follower = Follower(connection, index)
    follower.start()
    return follower, message


def _joined(address: tuple[str, int], secret: bytes) -> Connection:
    """What `multiprocessing.connection.Client` does, with a deadline: a leader that is frozen answers nobody."""
    with socket.create_connection(address, GREETING_S) as handle:
        handle.settimeout(None)
        connection = Connection(handle.detach())
    _limit_silence(connection, GREETING_S)
    answer_challenge(connection, secret)
    deliver_challenge(connection, secret)
    return connection


def _limit_silence(connection: Connection, seconds: float) -> None:
    """A receive of which no further byte comes for so long raises BlockingIOError."""
    with socket.socket(fileno=os.dup(connection.fileno())) as handle:
        wire.limit(handle, socket.SO_RCVTIMEO, seconds)


def _versions() -> dict[str, str]:
    import importlib.metadata

    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")} | {"python": sys.version.split()[0]}


def _send_at_once(connection: Connection) -> None:
    """Calls are small messages one after the other: none of them is to wait until the one before is acknowledged."""
    with socket.socket(fileno=os.dup(connection.fileno())) as handle:
        handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
