"""Where an agent listens."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepscope.capture.agent_http import Handle, Server, tcp_server, unix_server
from stepscope.errors import UsageError

_MIN_TOKEN: Final = 16
_UNIX: Final = "unix:"


@dataclass(frozen=True, slots=True)
class Place:
    """An address and a port, or a Unix socket, and what clients must show there.

    Attributes:
        address: a name or an IP address of this machine.
        port: 0 for a free one.
        token: the user's, or None for a random one.
        socket: path of a Unix socket instead of address and port; without a token of the user's it needs none, as
            only this user can connect.
    """

    address: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    socket: Path | None = None

    def check(self) -> None:
        """Find mistakes before anything is started.

        Raises:
            UsageError: the sentence says which.
        """
        if not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise UsageError(f"a port is a number from 0 to 65535, not {self.port!r}")
        if not self.address:
            raise UsageError("an agent listens on an address, such as 127.0.0.1; for all of them write 0.0.0.0")
        if self.socket is not None and (self.port or self.address != "127.0.0.1"):
            raise UsageError("an agent listens on a port or on a Unix socket, not on both")
        if self.token is not None and (len(self.token) < _MIN_TOKEN or not _is_plain(self.token)):
            raise UsageError(f"a token has at least {_MIN_TOKEN} letters, digits and signs, without spaces")

    def listen(self, token: str, handle: Handle) -> Server:
        """A server at this place.

        Raises:
            AgentError: it cannot listen here.
        """
        if self.socket is not None:
            return unix_server(self.socket, token=token, needs_token=self.token is not None, handle=handle)
        return tcp_server(self.address, self.port, token=token, handle=handle)

    def address_of(self, server: Server) -> str:
        """What clients connect to: "host:port", or "unix:" and the path."""
        if self.socket is not None:
            return f"{_UNIX}{self.socket}"
        host, port = server.socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def includes(self, address: str) -> bool:
        """Whether an agent at `address` is what a user who asks for this place wants."""
        if self.socket is not None:
            return address == f"{_UNIX}{self.socket}"
        return not self.port or address.endswith(f":{self.port}")


def is_loopback(host: str) -> bool:
    """Whether only programs on the same machine can connect to it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text
