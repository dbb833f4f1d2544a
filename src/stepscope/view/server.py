"""The server of the page: it answers this machine only, and only who knows the token of this start."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from stepscope.view.documents import (
    ACTIONS,
    CHANGED,
    HEADERS,
    LONGEST_QUERY,
    PAGE,
    Answer,
    Documents,
    bundled,
    framed_page,
)

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

FIRST_PORT: Final = 8765
_MOST_PORTS: Final = 100
_HEADERS: Final = {
    **HEADERS,
    "Content-Security-Policy": f"{HEADERS['Content-Security-Policy']}; frame-ancestors 'none'",
}


@dataclass(frozen=True)
class Door:
    """Who may come in: requests for this host with the token of this start, from no other site.

    Attributes:
        host: the address that the server listens at.
        port: the port, in the name of the cookie, since a browser gives a cookie to all ports of a host.
    """

    host: str
    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    @property
    def cookie(self) -> str:
        return f"stepscope-{self.port}"

    @property
    def address(self) -> str:
        host = "127.0.0.1" if self.host in ("", "0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/?token={self.token}"

    def is_named(self, host: str) -> bool:
        """Whether a request's Host is this machine: a name that another site can point here is not.

        Any port, since a tunnel may have another at its other end.
        """
        name = _host_name(host)
        if name is None:
            return False
        if is_loopback(self.host):
            return is_loopback(name)
        with contextlib.suppress(ValueError):
            return bool(ipaddress.ip_address(name))
        return name in ("localhost", self.host.lower(), socket.gethostname().lower(), socket.getfqdn().lower())

    def is_from_elsewhere(self, host: str, origin: str | None, site: str | None) -> bool:
        """Whether another site's page sends the request."""
        if origin is not None and _place(origin) != host.lower():
            return True
        return site not in (None, "same-origin", "none")

    def knows(self, token: str | None) -> bool:
        return token is not None and hmac.compare_digest(token.encode(), self.token.encode())


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def _place(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _host_name(host: str) -> str | None:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return None
    return name.lower() if name else None


class _Guarded:
    """Refuses what the door refuses, and adds the headers to every answer."""

    def __init__(self, app: ASGIApp, door: Door, seen: _Seen) -> None:
        self._app, self._door, self._seen = app, door, seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)
        answer = self._refusal(request)
        if answer is None:
            self._seen.now()
            answer = self._entry(request)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await (answer or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        door, headers = self._door, request.headers
        host = headers.get("host", "")
        if not door.is_named(host):
            return PlainTextResponse("This server answers to this machine's own name only.\n", 421)
        is_page = request.url.path == "/" and request.method == "GET"
        if door.is_from_elsewhere(host, headers.get("origin"), None if is_page else headers.get("sec-fetch-site")):
            return PlainTextResponse("Another site's page may not ask.\n", 403)
        if request.method == "POST" and "origin" not in headers:  # every browser tells it
            return PlainTextResponse("Only the page itself may ask for this.\n", 403)
        if len(request.scope["query_string"]) > LONGEST_QUERY:
            return PlainTextResponse("The address is too long.\n", 414)
        token = request.cookies.get(door.cookie)
        if door.knows(token) or (is_page and door.knows(request.query_params.get("token"))):
            return None
        return PlainTextResponse("Open the address that stepscope view printed: it has the token of this start.\n", 403)

    def _entry(self, request: Request) -> Response | None:
        """The answer that makes the token a cookie and takes it out of the address."""
        if "token" not in request.query_params or request.url.path != "/":
            return None
        answer = RedirectResponse("./", 303)
        answer.set_cookie(self._door.cookie, self._door.token, httponly=True, samesite="strict", path="/")
        return answer


class _Seen:
    """When the last request came."""

    def __init__(self) -> None:
        self.at_s = time.monotonic()

    def now(self) -> None:
        self.at_s = time.monotonic()


class Shown(Protocol):
    """What the page is about, in files that may change."""

    def is_changed(self) -> bool:
        """Whether a file is another than the one that was read."""

    def renew(self) -> bool:
        """Have changed files read again; whether there are any."""


def application(documents: Documents, door: Door, seen: _Seen | None = None, shown: Shown | None = None) -> ASGIApp:
    """The page, its script and style, and its documents at api/NAME. Loading the page reads changed files again.

    At frame is the page in one file, for an editor that asks for its documents.
    """

    async def page(_: Request) -> Response:
        if shown is not None and shown.renew():
            documents.forget()
        return Response(PAGE, media_type="text/html")

    async def script(_: Request) -> Response:
        return Response(bundled("page.js"), media_type="text/javascript")

    async def style(_: Request) -> Response:
        return Response(bundled("page.css"), media_type="text/css")

    async def frame(_: Request) -> Response:
        return Response(framed_page(), media_type="text/html")

    async def document(request: Request) -> Response:
        if (request.path_params["name"] in ACTIONS) != (request.method == "POST"):
            return PlainTextResponse("Method Not Allowed\n", 405)
        asked = asyncio.wrap_future(documents.ask(request.path_params["name"], dict(request.query_params)))
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait((asked, gone), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                return Response(status_code=408)  # nobody reads it
            answer: Answer = asked.result()
            headers = {CHANGED: "1"} if shown is not None and shown.is_changed() else None
            return Response(answer.body, answer.status, headers, media_type="application/json")
        finally:
            asked.cancel()
            gone.cancel()

    routes = [
        Route("/", page),
        Route("/page.js", script),
        Route("/page.css", style),
        Route("/frame", frame),
        Route("/api/{name}", document, methods=["GET", "POST"]),
    ]
    return _Guarded(Starlette(routes=routes), door, seen or _Seen())


async def _gone(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def listening(host: str, port: int | None) -> socket.socket:
    """A socket at this port; without one, at the first free port from FIRST_PORT on.

    Raises:
        OSError: the port is taken, or there is no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = range(FIRST_PORT, FIRST_PORT + _MOST_PORTS) if port is None else (port,)
    for each in ports:
        opened = socket.socket(family, socket.SOCK_STREAM)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind((host, each))
            opened.listen(128)
            return opened
        except OSError:
            opened.close()
            if each == ports[-1]:
                raise
    raise AssertionError


class _Server(uvicorn.Server):
    """Leaves signals to `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(documents: Documents, door: Door, shown: Shown, opened: socket.socket, idle_after_s: float) -> bool:
    """Serve until Ctrl-C, or until no request came for a time; whether it was the latter."""
    seen = _Seen()
    settings = uvicorn.Config(
        application(documents, door, seen, shown),
        log_config=None,
        log_level="critical",  # what ends or breaks off while it is answered is no news
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
    )
    server = _Server(settings)

    async def run() -> bool:
        loop = asyncio.get_running_loop()

        def end() -> None:
            server.should_exit = server.force_exit = True

        with contextlib.suppress(NotImplementedError):  # on Windows Ctrl-C raises KeyboardInterrupt
            loop.add_signal_handler(signal.SIGINT, end)
        serving = asyncio.create_task(server.serve([opened]))
        while not serving.done():
            left_s = seen.at_s + idle_after_s - time.monotonic()
            if left_s <= 0:
                end()
                await serving
                return True
            await asyncio.wait([serving], timeout=min(left_s, 60))
        await serving
        return False

    try:
        return asyncio.run(run())
    except KeyboardInterrupt:
        return False
