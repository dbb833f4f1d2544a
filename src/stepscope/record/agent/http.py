"""The agent's HTTP server: small, resistant to slow clients, closed to browsers.

Each connection carries one request. The time to send a request, its size and the number of connections are limited.
When all connections are in use, the one that has been sending its request for longest is closed, so that a client
that sends at once is always answered. A web page cannot use the server: requests with an Origin are refused, and so is
every Host that is a name somebody could make resolve to this machine (DNS rebinding).
"""

from __future__ import annotations

import contextlib
import hmac
import io
import ipaddress
import json
import logging
import os
import selectors
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final

from stepscope.errors import AgentError, UsageError
from stepscope.record.agent.protocol import MAX_BODY_BYTES, Refusal, Reply

Handle = Callable[[str, str, bytes], Reply]
"""Carries out a request: method, target, body."""

_REQUEST_S: Final = 10.0
"""Time for a client to send its whole request, and to receive each piece of the reply."""
_MAX_REQUEST_BYTES: Final = MAX_BODY_BYTES + 32 * 1024
_MAX_CONNECTIONS: Final = 64
_MAKE_ROOM_S: Final = 1.0
_EXHAUSTED_S: Final = 0.1
_BUSY: Final = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_MIN_TOKEN: Final = 16
_UNIX: Final = "unix:"
_log = logging.getLogger("stepscope.agent")


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """An HTTP server with one thread per connection, whose errors never reach the program.

    Args:
        address: host and port, or the path of a Unix socket.
    """

    daemon_threads = True
    request_queue_size = 128  # so that a burst of connections does not wait for TCP retries
    timeout = 1.0  # in case the connection is gone before it is accepted

    def __init__(self, address: Any, family: int, handle: Handle, token: str, *, needs_token: bool) -> None:
        self.address_family = family
        self.is_unix = family not in (socket.AF_INET, socket.AF_INET6)
        # on other systems two programs could share a port
        self.allow_reuse_address = os.name == "posix" and not self.is_unix
        self.handle, self.token, self.needs_token = handle, token, needs_token
        self.sending: dict[_BoundedInput, None] = {}  # incomplete requests, the oldest first
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._wake, self._woken = socket.socketpair()
        super().__init__(address, _Handler)

    def server_activate(self) -> None:
        if self.is_unix:
            os.chmod(str(self.server_address), 0o600)  # set before listening: until then nobody can connect
        super().server_activate()

    def serve_until_stopped(self) -> None:
        """Serve connections, without the periodic wake-ups of `serve_forever`."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while all(key.fileobj is not self._woken for key, _ in selector.select()):
                self.handle_request()

    def stop(self) -> None:
        """Make `serve_until_stopped` return."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def server_close(self) -> None:
        super().server_close()
        self._wake.close()
        self._woken.close()

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:  # usually the program has no file descriptor left; avoid a busy loop
            time.sleep(_EXHAUSTED_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in its own thread, or refuse it if there are too many."""
        if not self._free.acquire(blocking=False) and not self._make_room():
            with contextlib.suppress(OSError):
                request.settimeout(_EXHAUSTED_S)
                request.sendall(_BUSY)
            self.shutdown_request(request)
            return
        with contextlib.ExitStack() as if_no_thread_starts:
            if_no_thread_starts.callback(self._free.release)
            super().process_request(request, client_address)
            if_no_thread_starts.pop_all()

    def _make_room(self) -> bool:
        """Close the connection that has been sending its request for longest; return False if none is sending."""
        oldest = next(iter(self.sending.copy()), None)
        if oldest is None:
            return False
        self.sending.pop(oldest, None)
        oldest.end()
        return self._free.acquire(timeout=_MAKE_ROOM_S)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep the error off the program's standard error."""
        _log.debug("a connection failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "stepscope"
    sys_version = ""
    server: Any

    def setup(self) -> None:
        super().setup()
        self._input = _BoundedInput(self.connection, _REQUEST_S, _MAX_REQUEST_BYTES)
        self.rfile = io.BufferedReader(self._input)
        self.server.sending[self._input] = None

    def handle(self) -> None:
        try:
            super().handle()
        except _RejectedError as error:
            self._give_up(error)
        finally:
            self.server.sending.pop(self._input, None)

    def _give_up(self, error: _RejectedError) -> None:
        """Send the error to a client that accepts it at once; drop the others."""
        self.request_version, self.requestline, self.command = self.protocol_version, "", "GET"
        with contextlib.suppress(OSError):
            self._send(Reply(error.status, {"error": str(error)}), patience_s=_EXHAUSTED_S)

    def do_GET(self) -> None:
        try:
            self._refuse_browsers()
            self._refuse_strangers()
            body = self._body()
            self.server.sending.pop(self._input, None)
            reply = self.server.handle(self.command, self.path, body)
        except Refusal as refusal:
            reply = Reply(refusal.status, {"error": refusal.sentence})
        self._send(reply)

    do_POST = do_DELETE = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Report errors found by the standard library as JSON."""
        self._send(Reply(int(code), {"error": message or "this is not a request that an agent understands"}))

    def log_message(self, format: str, *arguments: Any) -> None:
        _log.debug(format, *arguments)

    def _refuse_browsers(self) -> None:
        if self.headers.get("Origin") is not None:
            raise Refusal(403, "an agent does not talk to web pages")
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not _is_own_name(hosts[0]):
            raise Refusal(403, "the Host of a request must be localhost, an IP address or this machine's name")

    def _refuse_strangers(self) -> None:
        if not self.server.needs_token:
            return
        shown = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(shown, f"Bearer {self.server.token}".encode()):
            raise Refusal(401, "the token is missing or wrong; it is in the agent's file")

    def _body(self) -> bytes:
        lengths = self.headers.get_all("Content-Length", [])
        if self.headers.get("Transfer-Encoding") is not None or len(lengths) > 1:
            raise Refusal(400, "a request needs exactly one Content-Length")
        text = lengths[0].strip() if lengths else "0"
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise Refusal(400, "the Content-Length is not a number")
        if int(text) > MAX_BODY_BYTES:
            raise Refusal(413, f"a request may have at most {MAX_BODY_BYTES} bytes")
        body = self.rfile.read(int(text))
        if len(body) < int(text):
            raise Refusal(400, "the request ended before its Content-Length")
        return body

    def _send(self, reply: Reply, patience_s: float | None = None) -> None:
        self.close_connection = True
        self.connection.settimeout(patience_s or _REQUEST_S)  # the client does not read; drop it
        if reply.file is not None:
            self._send_file(reply.file)
            return
        content = json.dumps(reply.body).encode() + b"\n"
        self._send_head(reply.status, "application/json", len(content))
        if self.command != "HEAD":
            self.wfile.write(content)

    def _send_file(self, path: Path) -> None:
        try:
            file = path.open("rb")
        except OSError as error:
            self._send(Reply(410, {"error": f"{path.name} cannot be read any more: {error.strerror}"}))
            return
        with file:
            self._send_head(200, "application/octet-stream", os.fstat(file.fileno()).st_size)
            self.connection.sendfile(file)

    def _send_head(self, status: int, kind: str, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.send_header("Connection", "close")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()


class _RejectedError(Exception):
    """A client took too long, or its connection is needed. Not an OSError, which the standard library would swallow."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class _BoundedInput(io.RawIOBase):
    """A client's input, limited in time and size."""

    def __init__(self, connection: socket.socket, seconds: float, bytes: int) -> None:
        self._connection = connection
        self._until = time.monotonic() + seconds
        self._bytes = bytes
        self._ended = False

    def readable(self) -> bool:
        return True

    def end(self) -> None:
        """Stop the reading thread, from any other thread."""
        self._ended = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: self._bytes]
        if not len(view):
            return 0
        left_s = self._until - time.monotonic()
        try:
            if left_s <= 0:
                raise TimeoutError
            self._connection.settimeout(left_s)
            count = self._connection.recv_into(view)
        except TimeoutError:
            raise _RejectedError(408, "the request took too long") from None
        if self._ended:
            raise _RejectedError(503, "the agent has too many clients: send the whole request at once")
        self._bytes -= count
        return count


def _is_own_name(host: str) -> bool:
    """Whether a Host is a name of this machine that nobody else controls."""
    name = host.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    machine = socket.gethostname().lower()
    return name in ("localhost", machine, machine.partition(".")[0]) or _ip_address(name) is not None


def is_loopback(host: str) -> bool:
    """Whether only programs on the same machine can connect to this address."""
    address = _ip_address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _ip_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an agent listens, and the token that clients need.

    Attributes:
        address: a name or an IP address of this machine.
        port: 0 for a free one.
        token: None for a random one.
        socket: path of a Unix socket instead of address and port; no token is needed there unless the user sets one,
            since only this user can connect.
    """

    address: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    socket: Path | None = None

    def check(self) -> None:
        """Check the settings before anything is started. Raises UsageError if a setting is invalid."""
        if not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise UsageError(f"a port is a number from 0 to 65535, not {self.port!r}")
        if not self.address:
            raise UsageError("an agent needs an address to listen on, such as 127.0.0.1, or 0.0.0.0 for all")
        if self.socket is not None and (self.port or self.address != "127.0.0.1"):
            raise UsageError("an agent listens on a port or on a Unix socket, not both")
        if self.token is not None and (len(self.token) < _MIN_TOKEN or not _is_plain(self.token)):
            raise UsageError(f"a token needs at least {_MIN_TOKEN} letters, digits or symbols, and no spaces")

    def listen(self, token: str, handle: Handle) -> Server:
        """Start listening. Raises AgentError if it cannot listen here."""
        if self.socket is not None:
            return self._listen_on_socket(self.socket, token, handle)
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        try:
            return Server((self.address, self.port), family, handle, token, needs_token=True)
        except (OSError, OverflowError) as error:
            raise AgentError(f"the agent cannot listen on {self.address} port {self.port}: {_reason(error)}") from error

    def _listen_on_socket(self, path: Path, token: str, handle: Handle) -> Server:
        family = getattr(socket, "AF_UNIX", None)
        if family is None:
            raise AgentError("this system has no Unix sockets; omit socket=")
        try:
            _remove_dead_socket(path)
            return Server(str(path), family, handle, token, needs_token=self.token is not None)
        except OSError as error:
            raise AgentError(f"the agent cannot listen on {path}: {_reason(error)}") from error

    def address_of(self, server: Server) -> str:
        """Return the address for clients: "host:port", or "unix:" and the path."""
        if self.socket is not None:
            return f"{_UNIX}{self.socket}"
        host, port = server.socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def includes(self, address: str) -> bool:
        """Whether an agent at `address` satisfies a request for this endpoint."""
        if self.socket is not None:
            return address == f"{_UNIX}{self.socket}"
        return not self.port or address.endswith(f":{self.port}")


def _remove_dead_socket(path: Path) -> None:
    """Remove the socket file of an agent that was killed; keep one that a process still listens on."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text
