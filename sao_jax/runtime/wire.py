"""Messages between the run and its rollout processes: a line of JSON and bytes, never pickled objects."""

import json
import socket
import struct
from multiprocessing.connection import Connection
from typing import Any

SEND_S = 10.0  # a message that nobody takes for this long is given up


def pair() -> tuple[Connection, socket.socket]:
    """Our end of a new channel, and the socket that a process inherits.

    A send at our end raises BlockingIOError (an OSError) after `SEND_S`: a process that is frozen, or itself waits for
    us to take something, does not hold up the run.
    """
    ours, theirs = socket.socketpair()
    limit(ours, socket.SO_SNDTIMEO, SEND_S)
    return Connection(ours.detach()), theirs


def limit(handle: socket.socket, option: int, seconds: float) -> None:
    """A send or receive (`option`: SO_SNDTIMEO or SO_RCVTIMEO) that stands still so long raises BlockingIOError."""
    handle.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *divmod(int(1e6 * seconds), 10**6)))


def encoded(kind: str, payload: bytes = b"", **fields: Any) -> bytes:
    return json.dumps({"kind": kind, **fields}).encode() + b"\n" + payload


def decoded(data: bytes) -> tuple[dict[str, Any], bytes]:
    """(kind and fields, payload). ValueError: garbage."""
    head, line, payload = data.partition(b"\n")
    try:
        fields = json.loads(head)
        if not line or not isinstance(fields["kind"], str):
            raise ValueError("no kind")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{len(data)} bytes that are no message: {error}") from None
    return fields, payload


def send(connection: Connection, kind: str, payload: bytes = b"", **fields: Any) -> None:
    """Raises OSError (also BrokenPipeError) if the other end is gone."""
    connection.send_bytes(encoded(kind, payload, **fields))


def receive(connection: Connection) -> tuple[dict[str, Any], bytes]:
    """The next message. EOFError: the other end is gone. ValueError: garbage."""
    return decoded(connection.recv_bytes())
