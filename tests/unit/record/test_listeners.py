"""Who listens at an address: real sockets that answer as an agent, a gRPC server, or neither."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from stepscope.errors import AgentError
from stepscope.record.agent.targets import Listener, listener_at

SETTINGS = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04\x00\x40\x00\x00"
"""The first frame of a gRPC server: HTTP/2 SETTINGS of six bytes on stream 0."""


@pytest.fixture
def server() -> Iterator[Callable[..., str]]:
    """Starts a server that waits for some bytes, sends an answer and hangs up, or stays silent with None."""
    listeners: list[socket.socket] = []
    ended = threading.Event()

    def start(*answers: bytes | None, asks: bool = True) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    if asks:
                        connection.recv(1000)
                    if answer is None:
                        ended.wait(60)
                    else:
                        connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    ended.set()
    for listener in listeners:
        listener.close()


def test_what_answers_http_may_be_an_agent() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        assert listener_at(f"127.0.0.1:{served.server_address[1]}") is Listener.AGENT
        served.shutdown()


def test_a_server_that_sends_settings_is_a_profiler_server(server: Callable[..., str]) -> None:
    assert listener_at(server(SETTINGS)) is Listener.PROFILER_SERVER


def test_one_that_hangs_up_on_http_is_asked_again_in_http_2(server: Callable[..., str]) -> None:
    assert listener_at(server(b"", SETTINGS)) is Listener.PROFILER_SERVER


@pytest.mark.parametrize(
    "answer", [b"220 mail.example ESMTP\r\n", b"\x00\x00\x06\x04\x00\x00\x00\x00\x07more", b"\x00"]
)
def test_an_answer_that_is_neither_is_refused(server: Callable[..., str], answer: bytes) -> None:
    with pytest.raises(AgentError, match="neither an agent of stepscope nor a profiler server"):
        listener_at(server(answer))


def test_silence_ends_in_a_sentence(server: Callable[..., str]) -> None:
    with pytest.raises(AgentError, match="has not answered within 0 s"):
        listener_at(server(None), answer_s=0.2)


def test_hanging_up_twice_ends_in_a_sentence(server: Callable[..., str]) -> None:
    with pytest.raises(AgentError, match="hung up without an answer"):
        listener_at(server(b"", b""))


def test_nobody_there_ends_in_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(AgentError, match=f"nothing listens at 127.0.0.1:{port}"):
        listener_at(f"127.0.0.1:{port}")


@pytest.mark.parametrize("host", ["h" * 300, "..", "a..b"])
def test_what_is_no_name_of_a_host_ends_in_a_sentence(host: str) -> None:
    with pytest.raises(AgentError, match="is not a host name"):
        listener_at(f"{host}:9012")
