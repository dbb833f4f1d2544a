"""What listens at an address: an agent of stepscope, which speaks HTTP, or a profiler server, which speaks gRPC."""

from __future__ import annotations

import contextlib
import socket
import time
from enum import Enum
from typing import Final

from stepscope.errors import AgentError

CONNECT_S: Final = 5.0
ANSWER_S: Final = 20.0
"""An agent shares its interpreter with the program, so it may take a while to answer."""

_HTTP: Final = b"GET /status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_HTTP_2: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""How a gRPC connection begins: the preface, and a SETTINGS frame without settings (RFC 9113, 3.4)."""
_FRAME_BYTES: Final = 9
_MOST_BYTES: Final = 1 << 16
_SETTINGS: Final = 4


class Listener(Enum):
    """Who answers."""

    AGENT = "an agent of stepscope"
    PROFILER_SERVER = "a profiler server"


def listener_at(address: str, *, connect_s: float = CONNECT_S, answer_s: float = ANSWER_S) -> Listener:
    """Who listens at "host:port"; anything that answers HTTP/1 may be an agent.

    Raises:
        AgentError: nobody listens, nobody answers in time, or the answer is neither HTTP nor gRPC.
    """
    first = _first_bytes(address, _HTTP, connect_s, answer_s)
    if first.startswith(b"HTTP/"):
        return Listener.AGENT
    if _is_settings(first) or (not first and _is_settings(_first_bytes(address, _HTTP_2, connect_s, answer_s))):
        return Listener.PROFILER_SERVER
    if not first:
        raise AgentError(f"{address} hung up without an answer: the process has ended, or is busy")
    raise AgentError(
        f"{address} is neither an agent of stepscope nor a profiler server: it speaks neither HTTP nor gRPC"
    )


def _is_settings(answer: bytes) -> bool:
    """Whether an answer begins with the frame that every HTTP/2 server sends first, on stream 0."""
    return len(answer) >= _FRAME_BYTES and answer[3] == _SETTINGS and answer[5:_FRAME_BYTES] == bytes(4)


def _take_rest(connection: socket.socket, answer: bytes) -> None:
    """Let an HTTP server finish: to hang up on it would be an error in its log."""
    left = _MOST_BYTES if answer.startswith(b"HTTP/") else 0
    with contextlib.suppress(OSError):
        while left > 0 and (part := connection.recv(left)):
            left -= len(part)


def _first_bytes(address: str, request: bytes, connect_s: float, answer_s: float) -> bytes:
    """The first bytes of the answer, at most as many as tell whose it is; empty where the other side hangs up."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), connect_s) as connection:
            until = time.monotonic() + answer_s
            connection.settimeout(answer_s)
            connection.sendall(request)
            answer = b""
            while len(answer) < _FRAME_BYTES and (left_s := until - time.monotonic()) > 0:
                connection.settimeout(left_s)
                part = connection.recv(64)
                if not part:
                    break
                answer += part
            _take_rest(connection, answer)
            return answer
    except ConnectionRefusedError:
        raise AgentError(f"nothing listens at {address}: the process or its agent has ended") from None
    except TimeoutError:
        raise AgentError(f"{address} has not answered within {answer_s:.0f} s") from None
    except ConnectionError:
        return b""
    except UnicodeError:  # of IDNA, which splits a name into its parts
        raise AgentError(f"{address} cannot be reached: {host[:100]!r} is no name of a host") from None
    except OSError as error:
        raise AgentError(f"{address} cannot be reached: {error.strerror or error}") from error
