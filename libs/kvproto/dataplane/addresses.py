"""Adapter: the data plane's addresses, `unix:/path` and `tcp:host:port`, and their sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvproto.dataplane.errors import PeerGone, PeerTimeout
from kvproto.errors import InvalidRequest, Unavailable

MAX_UNIX_PATH_BYTES = 107  # Linux: sockaddr_un.sun_path, less its closing zero
_BACKLOG = 64
_UNIX_BUFFER_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp:{self.host}:{self.port}"


Address = UnixAddress | TcpAddress


def parse(text: str) -> Address:
    """Raises InvalidRequest."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest.startswith("/"):
        return UnixAddress(rest)
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536:
        return TcpAddress(host, int(port))
    raise InvalidRequest(f"unix:/path or tcp:host:port, got {text[:120]!r}")


def candidates(addresses: Iterable[str], *, same_host: bool) -> list[Address]:
    """In the order to try them: existing Unix sockets, if the peer is on this host, then TCP."""
    parsed = [parse(text) for text in addresses]
    local = [each for each in parsed if isinstance(each, UnixAddress) and same_host and os.path.exists(each.path)]
    return [*local, *(each for each in parsed if isinstance(each, TcpAddress))]


def connected(address: Address, deadline: float) -> socket.socket:
    """Raises PeerGone or PeerTimeout."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise PeerTimeout(f"no time left to connect to {address}")
    try:
        if isinstance(address, TcpAddress):
            sock = socket.create_connection((address.host, address.port), timeout=left)
        else:
            sock = socket.socket(socket.AF_UNIX)
        try:
            if isinstance(address, UnixAddress):
                sock.settimeout(left)
                sock.connect(address.path)
            tune(sock)
        except BaseException:
            sock.close()
            raise
        return sock
    except TimeoutError:
        raise PeerTimeout(f"{address} does not answer") from None
    except OSError as error:
        raise PeerGone(f"cannot connect to {address}: {error}") from None


def tune(sock: socket.socket) -> None:
    """TCP sends heads at once and notices a vanished host on idle connections; Unix sockets get a large buffer."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def listening_tcp(host: str, port: int) -> tuple[socket.socket, TcpAddress]:
    """Port 0: any. Raises Unavailable."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host}:{port}: {error}") from None
    return sock, TcpAddress(host, sock.getsockname()[1])


def listening_unix(path: Path) -> tuple[socket.socket, UnixAddress]:
    """A socket file of mode 0600 in a folder of mode 0700. Replaces a stale file. Raises Unavailable."""
    path = path.absolute()
    size = len(os.fsencode(path))
    if size > MAX_UNIX_PATH_BYTES:
        raise Unavailable(f"the socket path {path} has {size} bytes, at most {MAX_UNIX_PATH_BYTES}: choose a shorter")
    sock = socket.socket(socket.AF_UNIX)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(path.parent.stat().st_mode)
        if mode & 0o077:
            raise Unavailable(f"{path.parent} has mode {mode:04o}: a folder of sockets must be its owner's alone, 0700")
        _remove_stale(path)
        sock.bind(str(path))
        path.chmod(0o600)
        sock.listen(_BACKLOG)
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise Unavailable(f"cannot listen on {path}: {error}") from None
        raise
    return sock, UnixAddress(str(path))


def _remove_stale(path: Path) -> None:
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise Unavailable(f"{path} is there and is no socket")
    with socket.socket(socket.AF_UNIX) as trial:
        trial.settimeout(1.0)
        try:
            trial.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        else:
            raise Unavailable(f"another process serves {path}")
