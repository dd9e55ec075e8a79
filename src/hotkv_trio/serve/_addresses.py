"""Where shards listen: ``HOST:PORT``, ``[IPV6]:PORT`` or ``unix:PATH``; and what may listen there, or call there."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, final

import attrs
import trio

from hotkv_trio._errors import InvalidInput

if TYPE_CHECKING:
    import ssl
    from collections.abc import Generator, Sequence

_PROBES = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000))
"""Seconds, and milliseconds for the last; not every system has all."""


@attrs.frozen
class TCPAddress:
    """A host, by name or number, and a port; to listen, port 0 means any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        """As it is written."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@attrs.frozen
class UnixAddress:
    """The path of a Unix socket."""

    path: str

    def __str__(self) -> str:
        """As it is written."""
        return f"unix:{self.path}"


def parse_address(text: str) -> TCPAddress | UnixAddress:
    """Return an address.

    Raises:
        InvalidInput: it is none.
    """
    if text.startswith("unix:") and len(text) > len("unix:"):
        return UnixAddress(text.removeprefix("unix:"))
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%a-z]+)\]|([^\[\]:/\s]+)):(\d{1,5})", text)
    if match is None or int(match[3]) > 65_535:
        raise InvalidInput(f"an address is HOST:PORT, [IPV6]:PORT or unix:PATH, not {text!r:.200}")
    return TCPAddress(match[1] or match[2], int(match[3]))


async def open_listeners(
    where: TCPAddress | UnixAddress, *, has_token: bool, ssl_context: ssl.SSLContext | None, insecure: bool
) -> Sequence[trio.abc.Listener[trio.abc.Stream]]:
    """Listen.

    A Unix socket is the owner's alone (mode 0600).  One that nobody listens on any more is replaced.  The file goes
    when the listener is closed, unless another's is there by then.

    Raises:
        InvalidInput: the address is beyond loopback and there is no token, or neither TLS nor ``insecure``.
        OSError: it cannot be had.
    """
    with _naming(where):
        if isinstance(where, UnixAddress):
            listeners: Sequence[trio.abc.Listener[trio.SocketStream]] = [await _open_unix_listener(where.path)]
        else:
            found = await trio.socket.getaddrinfo(
                where.host, where.port, type=trio.socket.SOCK_STREAM, flags=trio.socket.AI_PASSIVE
            )
            if not all(is_loopback(str(sockaddr[0])) for *_, sockaddr in found):
                require_safe(str(where), has_token=has_token, encrypted=ssl_context is not None, insecure=insecure)
            listeners = await trio.open_tcp_listeners(where.port, host=where.host)
    if ssl_context is None:
        return listeners
    return [trio.SSLListener(listener, ssl_context, https_compatible=True) for listener in listeners]


@contextmanager
def _naming(where: TCPAddress | UnixAddress) -> Generator[None]:
    """Say in an error of the system which address it is about."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            # Python's own, of a path that is too long, has no room for one.
            raise OSError(errno.ENAMETOOLONG, str(error), str(where)) from error
        error.filename = error.filename or str(where)
        raise


async def connect(
    where: TCPAddress | UnixAddress, *, has_token: bool, ssl_context: ssl.SSLContext | None, insecure: bool
) -> trio.abc.Stream:
    """Connect; with TLS, the handshake is done when this returns.

    Raises:
        InvalidInput: a token would travel in plain text beyond loopback.
        OSError: nobody answers.
        trio.BrokenResourceError: the handshake failed.
    """
    if isinstance(where, UnixAddress):
        stream = await trio.open_unix_socket(where.path)
        name = "localhost"
    else:
        stream = await trio.open_tcp_stream(where.host, where.port)
        name = where.host
        _keep_alive(stream)
        if has_token and ssl_context is None and not insecure and not is_loopback(str(stream.socket.getpeername()[0])):
            await trio.aclose_forcefully(stream)
            raise InvalidInput(f"a token would travel to {where} in plain text: use TLS, or say insecure")
    if ssl_context is None:
        return stream
    secure: trio.SSLStream[trio.SocketStream] = trio.SSLStream(
        stream, ssl_context, server_hostname=name, https_compatible=True
    )
    try:
        await secure.do_handshake()
    except BaseException:
        await trio.aclose_forcefully(secure)
        raise
    return secure


def require_safe(where: str, *, has_token: bool, encrypted: bool, insecure: bool) -> None:
    """Return only if a listener beyond loopback may be.

    Raises:
        InvalidInput: it may not; says why.
    """
    if not has_token:
        raise InvalidInput(
            f"{where} is beyond loopback, and there is no token: whoever reaches it could use the model and its memory"
        )
    if not encrypted and not insecure:
        raise InvalidInput(
            f"{where} is beyond loopback, and without TLS: token, prompts and hidden states would travel in plain text;"
            " give a certificate, or say insecure"
        )


def is_loopback(host: str) -> bool:
    """Return whether a numeric address is this machine's own, and nobody else's."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def name_of(listener: trio.abc.Listener[trio.abc.Stream]) -> str:
    """Return where a listener listens, as an address."""
    if isinstance(listener, trio.SSLListener):
        return name_of(listener.transport_listener)
    if isinstance(listener, _UnixListener):
        return str(UnixAddress(listener.path))
    if not isinstance(listener, trio.SocketListener):
        return repr(listener)
    name = listener.socket.getsockname()
    if isinstance(name, str | bytes):
        return str(UnixAddress(os.fsdecode(name)))
    return str(TCPAddress(name[0], name[1]))


def tune(stream: trio.abc.Stream) -> None:
    """Let the system find out about a TCP peer that is gone without a word."""
    if isinstance(stream, trio.SSLStream):
        tune(stream.transport_stream)
    elif isinstance(stream, trio.SocketStream) and stream.socket.family != trio.socket.AF_UNIX:
        _keep_alive(stream)


def _keep_alive(stream: trio.SocketStream) -> None:
    # A peer that is gone already is found out by the first use; some systems refuse its options before that.
    with suppress(OSError):
        stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES:
            if (option := getattr(trio.socket, name, None)) is not None:
                stream.setsockopt(trio.socket.IPPROTO_TCP, option, value)


@final
class _UnixListener(trio.abc.Listener[trio.SocketStream]):
    """A Unix socket that takes its file with it."""

    def __init__(self, sock: trio.socket.SocketType, path: str) -> None:
        self.path = path
        self._inner = trio.SocketListener(sock)
        self._file = _identity(path)

    async def accept(self) -> trio.SocketStream:
        return await self._inner.accept()

    async def aclose(self) -> None:
        # Before the close, which sets the number of the file's inode free for another's socket at this path.
        if self._inner.socket.fileno() >= 0:
            with suppress(OSError):
                if _identity(self.path) == self._file:
                    os.unlink(self.path)  # noqa: PTH108, ASYNC240
        await self._inner.aclose()


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


async def _open_unix_listener(path: str) -> _UnixListener:
    await _remove_deserted(path)
    sock = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    try:
        await sock.bind(path)
        # Nobody can connect before listen.
        os.chmod(path, 0o600)  # noqa: PTH101, ASYNC240
        sock.listen(256)
        return _UnixListener(sock, path)
    except BaseException:
        sock.close()
        raise


async def _remove_deserted(path: str) -> None:  # noqa: ASYNC910
    """Remove the socket that a server which was killed has left behind."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):  # noqa: PTH116, ASYNC240
            raise FileExistsError(errno.EEXIST, "not a socket", path)
    except FileNotFoundError:
        await trio.lowlevel.checkpoint()
        return
    try:
        stream = await trio.open_unix_socket(path)
    except ConnectionRefusedError:
        os.unlink(path)  # noqa: PTH108, ASYNC240
    else:
        await trio.aclose_forcefully(stream)
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), path)
