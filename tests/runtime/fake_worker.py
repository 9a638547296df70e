"""A rollout process without a model, for tests of what the run does about its processes.

It answers every task of the run's messages at once, or misbehaves as the file `behaviour` in its folder says: one word
for all processes, read at every task.
"""

import contextlib
import os
import pathlib
import signal
import sys
import time
import zlib
from multiprocessing.connection import Connection

from sao_jax.data.segments import new_segment, save_segment
from sao_jax.data.trajectory import TrajectoryBuilder, save_trajectory
from sao_jax.runtime import wire


def trajectory(message, version, *, logp=-0.5, tokens=(1, 2)):
    labels = {k: message[k] for k in ("rollout", "attempt", "group", "sample", "seed", "temperature") if k in message}
    builder = TrajectoryBuilder([0, 1], task="t", **labels)
    builder.add_action(tokens, [logp] * len(tokens), [version] * len(tokens))
    builder.add_reward(float(message["index"] % 2))
    return builder


def main():
    connection, folder = Connection(int(sys.argv[1])), pathlib.Path(sys.argv[2])
    version, prepared = -1, -1

    def behaviour():
        path = folder / "behaviour"
        return path.read_text() if path.exists() else ""

    def once(word):
        """Whether to misbehave in this way, the first process that asks alone."""
        if behaviour() != word:
            return False
        try:
            (folder / f"{word}.done").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    config, _ = wire.receive(connection)
    hot = behaviour() == "hot" and config["device"] == 1
    status = {"utilization": 0.5, "utilization_slots": 0.25, "temperature_c": 90.0 if hot else 50.0, "free_memory": 0.5}
    wire.send(connection, "status", **status)
    wire.send(connection, "ready", pid=os.getpid())
    while True:
        if not connection.poll(0.05):
            wire.send(connection, "status", **status)
            continue
        message, _ = wire.receive(connection)
        kind = message["kind"]
        if kind == "end":
            return
        if kind == "prepare":
            path = pathlib.Path(message["path"])
            if behaviour() == "refuse" and (folder / "refuse.done").exists() and not (folder / "late.done").exists():
                (folder / "late.done").touch()
                time.sleep(0.5)  # until the weights have been announced again
            if once("refuse") or zlib.crc32(path.read_bytes()) != message["crc32"]:
                wire.send(connection, "refused", version=message["version"], reason="checksum")
            else:
                prepared = message["version"]
                wire.send(connection, "prepared", version=prepared)
        if kind == "commit":
            assert prepared == message["version"], "committed without having been prepared"
            version, prepared = prepared, -1
            wire.send(connection, "committed", version=version)
        if kind != "start":
            continue
        if once("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if once("exit"):
            sys.exit(3)
        if once("hang"):
            time.sleep(3600)
        if once("nonsense"):
            connection.send_bytes(b"\xff\xfe nonsense")
        if behaviour() == "slow":
            time.sleep(0.2)
        if once("senseless"):
            segment = new_segment(trajectory(message, version), steps_per_segment=1)
            segment.rewards.flags.writeable = True
            segment.rewards[-1] = float("nan")
            wire.send(connection, "segment", save_segment(segment))
            time.sleep(3600)
        if once("seam"):
            segment = new_segment(trajectory(message, version), steps_per_segment=1)
            wire.send(connection, "segment", save_segment(segment))
            os.kill(os.getpid(), signal.SIGKILL)
        logp, tokens, at = -0.5, (1, 2), version
        if once("strange"):
            tokens = (1, 99)
        if once("nan"):
            logp = float("nan")
        if once("long"):
            tokens = tuple([1] * 1000)
        if once("future"):
            at = version + 7
        if once("other"):
            message["rollout"] += 10**6
        builder = trajectory(message, at, logp=logp, tokens=tokens)
        wire.send(connection, "ended", save_trajectory(builder.build("terminated", "answer")))


if __name__ == "__main__":
    with contextlib.suppress(EOFError, OSError):
        main()
