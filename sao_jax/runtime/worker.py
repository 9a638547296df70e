"""A rollout process: an engine and environments of its own, driven by messages.

    run -> worker   config, start, stop, prepare, commit, end
    worker -> run   ready, status, segment, ended, failed, prepared, refused, committed

It decides nothing: what it is told to start it runs, and it swaps weights between two bursts once it is told to commit
those it has prepared. It never writes to the run's folder, and it ends when the run is gone.
"""

import contextlib
import dataclasses
import os
import pathlib
import sys
import time
from multiprocessing.connection import Connection

from sao_jax.data.segments import Segment, save_segment
from sao_jax.data.trajectory import Trajectory, load_trajectory, save_trajectory
from sao_jax.runtime import wire
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.telemetry import Source, nvml_source, recorded_source

STATUS_S = 0.5  # between two of them, whatever else is sent: they are how busy and how hot the device is


class Worker:
    """The loop of one rollout process."""

    def __init__(self, connection: Connection, config: RunConfig, slots: int, source: Source | None, device: int):
        """`source`: of temperatures, which is asked about `device`: the one of this process, or one of a recording."""
        from sao_jax.runtime.devices import data_mesh
        from sao_jax.runtime.run import family_and_context, make_agents, make_engine, random_policy
        from sao_jax.runtime.utilization import DeviceWatch

        self._connection = connection
        config = dataclasses.replace(config, slots=slots, devices=1)
        family, context = family_and_context(config)
        self._like = random_policy(config, family)
        engine = make_engine(config, family, context, self._like, data_mesh(1))
        self._agents = make_agents(config, family, context, engine)
        self._agents.seam = self._seam
        self._watch = DeviceWatch(1)
        self._agents.watched(self._watch.enqueued)
        self._source, self._device = source, device
        self._prepared: dict[int, dict] = {}  # weights by version, not committed yet
        self._began, self._status_at = time.monotonic(), -float("inf")
        self._live = False

    def go(self) -> None:
        """Until told to end, or until the run is gone."""
        self._agents.engine.warm_up()
        self._tell_status()  # a hot device is to get nothing from the start
        self._send("ready", pid=os.getpid())
        while True:
            wait = 0.0 if self._live or self._agents.running else STATUS_S
            while self._connection.poll(wait):
                if not self._obey(*wire.receive(self._connection)):
                    return
                wait = 0.0
            for item in self._agents.collect():
                if isinstance(item, Trajectory):
                    self._send("ended", save_trajectory(item))
                else:
                    self._send("failed", rollout=item.rollout, attempt=item.attempt, reason=item.reason)
            self._live = self._agents.dispatch()
            if time.monotonic() - self._status_at > STATUS_S:
                self._tell_status()

    def close(self) -> None:
        """Waits for the device calls that are being watched: a thread that is in one when Python ends aborts it."""
        self._watch.close()

    def _tell_status(self) -> None:
        self._status_at = time.monotonic()
        utilization, weighted = self._watch.read()
        status = {"utilization": utilization, "utilization_slots": weighted}
        if self._source is not None:
            readings = self._source(time.monotonic() - self._began)
            if readings:
                reading = readings[self._device % len(readings)]
                status |= {"temperature_c": reading.temperature_c, "free_memory": reading.free_memory}
        self._send("status", **status)

    def _obey(self, message: dict, payload: bytes) -> bool:
        kind = message.pop("kind")
        if kind == "start":
            snapshot = load_trajectory(payload) if payload else None
            self._agents.start(message.pop("split"), message.pop("index"), snapshot=snapshot, **message)
        elif kind == "prepare":
            self._prepare(message, payload)
        elif kind == "commit":
            self._commit(message["version"])
        elif kind == "stop":
            self._agents.stop()
        elif kind == "end":
            return False
        else:
            raise ValueError(f"unknown message {kind!r}")
        return True

    def _prepare(self, message: dict, payload: bytes) -> None:
        """Weights come with the message, or lie in a file that it names."""
        from sao_jax.runtime.weights import load_weights

        version = message["version"]
        try:
            data = pathlib.Path(message["path"]).read_bytes() if "path" in message else payload
            self._prepared[version] = load_weights(data, self._like, message["crc32"])
        except (OSError, ValueError) as error:
            self._send("refused", version=version, reason=str(error))
        else:
            self._send("prepared", version=version)

    def _commit(self, version: int) -> None:
        # A process that has just come up is told of the weights in use and of the next ones, maybe at once.
        if version not in self._prepared:
            raise ValueError(f"version {version} is to be committed and was not prepared")
        self._agents.engine.publish(self._prepared[version], version)
        self._prepared = {newer: params for newer, params in self._prepared.items() if newer > version}
        self._send("committed", version=version)

    def _seam(self, segment: Segment) -> None:
        self._send("segment", save_segment(segment))

    def _send(self, kind: str, payload: bytes = b"", **fields) -> None:
        wire.send(self._connection, kind, payload, **fields)


def serve(socket: int) -> None:
    """A worker at a socket, until it is told to end or the run is gone."""
    connection = Connection(socket)
    try:
        message, _ = wire.receive(connection)
        from sao_jax.runtime.devices import prepare_backend

        prepare_backend(1)
        config = RunConfig.from_json(message["config"])
        device = message["device"] if message["readings"] else 0
        with contextlib.closing(
            Worker(connection, config, message["slots"], _source(message["readings"]), device)
        ) as worker:
            worker.go()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the run is gone, and so is the reason to go on
    finally:
        connection.close()


def _source(recording: str | None) -> Source | None:
    try:
        return recorded_source(recording) if recording else nvml_source()
    except ValueError as error:
        print(f"temperatures are not balanced: {error}", flush=True)
        return None


if __name__ == "__main__":
    serve(int(sys.argv[1]))
