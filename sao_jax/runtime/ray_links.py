"""Rollout processes as Ray actors, on this machine or on a cluster. Weights go through Ray's object store.

An actor runs the same `Worker` as a local process, on a thread, and its methods are the other end of its channel. Ray
itself moves the bytes; within a message there are never pickled objects.
"""

import collections
import os
import pathlib
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from sao_jax.runtime import wire
from sao_jax.runtime.links import Message

POLL_S = 1.0  # an actor answers a call for messages after this long at the latest

try:
    import ray
except ImportError:
    raise ValueError("--backend ray needs the package ray: pip install 'sao_jax[ray]'") from None


class Actor:
    """On the worker's machine: a worker on a thread and the other end of its channel."""

    def __init__(self):
        from sao_jax.runtime.worker import serve

        self._connection, theirs = wire.pair()
        self._served = ThreadPoolExecutor(1, "worker").submit(serve, theirs.detach())

    # One thread sends, or messages would come in another order, and large ones in pieces of each other.
    @ray.method(concurrency_group="send")
    def send(self, data: bytes) -> None:
        self._connection.send_bytes(data)

    @ray.method(concurrency_group="send")
    def announce(self, weights: bytes, version: int, crc32: int) -> None:
        wire.send(self._connection, "prepare", weights, version=version, crc32=crc32)

    @ray.method(concurrency_group="receive")
    def receive(self) -> list[bytes]:
        """What the worker has sent; waits for the first message. Once it has ended: its error, or EOFError."""
        found = []
        try:
            while self._connection.poll(0.0 if found else POLL_S):
                found.append(self._connection.recv_bytes())
        except EOFError:
            if not found:
                self._served.result()
                raise
        return found

    def where(self) -> tuple[str, int]:
        return ray.util.get_node_ip_address(), os.getpid()


class RayLink:
    def __init__(self, backend: "RayBackend", gpus: int):
        # Receiving waits within the actor, so it and sending need a thread each.
        options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0}
        remote = ray.remote(concurrency_groups={"send": 1, "receive": 1})(Actor)
        self._actor = remote.options(**options).remote()
        self._backend, self._gone = backend, "ended"
        self._sent: list[ray.ObjectRef] = []  # of which it is not known yet that they have arrived
        self._place = self._actor.where.remote()
        self.reply = self._actor.receive.remote()

    @property
    def where(self) -> str:
        """Known once the actor has started."""
        if not ray.wait([self._place], timeout=0)[0]:
            return "waits for a free place in the cluster"
        try:
            address, pid = ray.get(self._place)
        except ray.exceptions.RayError:
            return "gone"
        return f"{address}, process {pid}"

    def send(self, kind: str, payload: bytes = b"", **fields) -> None:
        self._sent.append(self._actor.send.remote(wire.encoded(kind, payload, **fields)))

    def announce(self, version: int, path: pathlib.Path, crc32: int) -> None:
        self._sent.append(self._actor.announce.remote(self._backend.stored(path, crc32), version, crc32))

    def messages(self) -> Iterator[Message]:
        try:
            if self._sent:
                arrived, self._sent = ray.wait(self._sent, num_returns=len(self._sent), timeout=0)
                ray.get(arrived)
            found = ray.get(self.reply)
        except ray.exceptions.RayTaskError as error:
            self._gone = f"ended: {type(error.cause).__name__} {error.cause}".strip()
            raise EOFError from None
        except ray.exceptions.RayError as error:
            self._gone = str(error).strip().splitlines()[0]
            raise EOFError from None
        self.reply = self._actor.receive.remote()
        yield from map(wire.decoded, found)

    def end_of(self) -> str:
        return self._gone

    def kill(self) -> None:
        ray.kill(self._actor)

    def close(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            try:
                ray.get(self.reply, timeout=max(0.0, deadline - time.monotonic()))
            except ray.exceptions.RayError:
                break  # it has ended, or time is up
            self.reply = self._actor.receive.remote()
        self.kill()


class RayBackend:
    """Actors of the cluster that RAY_ADDRESS names, else of one that is started on this machine."""

    def __init__(self, workers: int, gpus: int):
        """`gpus`: of each actor."""
        self._gpus = gpus
        self._weights: collections.OrderedDict[tuple, ray.ObjectRef] = collections.OrderedDict()
        if not ray.is_initialized():
            local = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": max(workers, os.cpu_count() or 1)}
            path = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            ray.init(
                include_dashboard=None if os.environ.get("RAY_ADDRESS") else False,
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={} if os.environ.get("RAY_ADDRESS") else {"env_vars": path},
                **local,
            )

    def start(self, name: str) -> RayLink:
        return RayLink(self, self._gpus)

    def stored(self, path: pathlib.Path, crc32: int) -> "ray.ObjectRef":
        """The file's bytes in the object store, put there once for all actors."""
        if (path, crc32) not in self._weights:
            data = path.read_bytes()
            put = ray.put(data)
            if zlib.crc32(data) != crc32:
                return put  # damaged: the actors will refuse it, and it is written again under the same name
            self._weights[path, crc32] = put
            while len(self._weights) > 2:  # those in use and those on their way
                self._weights.popitem(last=False)
        return self._weights[path, crc32]

    def wait(self, links: Sequence[RayLink], seconds: float) -> list[RayLink]:
        if not links:
            time.sleep(seconds)
            return []
        by_reply = {link.reply: link for link in links}
        ready, _ = ray.wait(list(by_reply), num_returns=1, timeout=seconds)
        if ready:
            ready, _ = ray.wait(list(by_reply), num_returns=len(by_reply), timeout=0)
        return [by_reply[reply] for reply in ready]
