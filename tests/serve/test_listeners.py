"""Where a server listens, and who gets through: TCP, Unix sockets, TLS, and what is refused beyond loopback."""

from __future__ import annotations

import logging
import socket
import ssl
import stat
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from hotkv_trio import InvalidInput
from hotkv_trio.serve import ConnectionLost, ProtocolError, open_shard_client
from hotkv_trio.serve._addresses import TCPAddress, UnixAddress, is_loopback, open_listeners, parse_address
from tests.serve._rig import ALICE, key, open_rig, until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.serve._rig import Rig

CERTIFICATES = Path(__file__).parent / "certificates"


def server_context(*, client_certificates: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATES / "server.pem")
    if client_certificates:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(CERTIFICATES / "ca.pem")
    return context


def client_context(authority: str = "ca.pem", certificate: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(CERTIFICATES / authority))
    if certificate is not None:
        context.load_cert_chain(CERTIFICATES / certificate)
    return context


@asynccontextmanager
async def serving(
    *where: str, tokens: list[str] | None = None, **options: Any
) -> AsyncGenerator[tuple[Rig, list[str]]]:
    async with open_rig(tokens=tokens or []) as rig, trio.open_nursery() as nursery:
        names = await nursery.start(lambda **kwargs: rig.server.serve(*where, **options, **kwargs))
        try:
            yield rig, names
        finally:
            await rig.server.drain(1)  # noqa: ASYNC102


async def use(rig: Rig, where: str, **options: Any) -> None:
    """Use a session over an address."""
    async with open_shard_client(where, **options) as client, client.open_session(key("a")) as session:
        assert rig.is_solo((await session.prefill([1, 2, 3])).output, [1, 2, 3])


@pytest.mark.parametrize(
    "text,address",
    [
        ("127.0.0.1:80", TCPAddress("127.0.0.1", 80)),
        ("shard-3.example:7070", TCPAddress("shard-3.example", 7070)),
        ("[::1]:0", TCPAddress("::1", 0)),
        ("unix:/run/hotkv.sock", UnixAddress("/run/hotkv.sock")),
    ],
)
def test_addresses_read_as_they_are_written(text: str, address: object) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", ":80", "localhost", "localhost:", "localhost:65536", "::1:80", "unix:", "http://x:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize(
    "host,expected",
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("name", False),
        ("fe80::1%eth0", False),
    ],
)
def test_loopback(host: str, *, expected: bool) -> None:
    assert is_loopback(host) is expected


async def test_tcp_and_unix_at_once(tmp_path: Path) -> None:
    path = tmp_path / "shard.sock"
    async with serving("127.0.0.1:0", f"unix:{path}") as (rig, names):
        tcp, unix = names
        assert unix == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        await use(rig, tcp)
        await use(rig, unix)


async def test_a_deserted_unix_socket_is_replaced_one_in_use_is_not(tmp_path: Path) -> None:
    path = tmp_path / "shard.sock"
    with socket.socket(socket.AF_UNIX) as deserted:
        deserted.bind(str(path))
    async with serving(f"unix:{path}") as (rig, _):
        await use(rig, f"unix:{path}")
        with pytest.raises(OSError, match="in use"):
            await rig.server.serve(f"unix:{path}")
    (tmp_path / "file").write_text("kept", encoding="utf-8")
    async with open_rig() as rig:
        with pytest.raises(FileExistsError):
            await rig.server.serve(f"unix:{tmp_path / 'file'}")
        assert (tmp_path / "file").read_text(encoding="utf-8") == "kept"


@pytest.mark.parametrize("end", ["drained", "cancelled", "never served"])
@pytest.mark.parametrize("encrypted", [False, True])
async def test_the_file_of_a_unix_socket_goes_with_its_server(tmp_path: Path, end: str, *, encrypted: bool) -> None:
    path = tmp_path / "shard.sock"
    options: dict[str, Any] = {"ssl_context": server_context() if encrypted else None}
    async with open_rig() as rig, trio.open_nursery() as nursery:
        if end == "never served":
            with pytest.raises(InvalidInput):
                await rig.server.serve(f"unix:{path}", "no address", **options)
        else:
            await nursery.start(partial(rig.server.serve, f"unix:{path}", **options))
            assert path.is_socket()
            if end == "drained":
                await rig.server.drain(1)
            nursery.cancel_scope.cancel()
    assert not path.exists()


async def test_a_unix_socket_that_another_server_has_bound_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "shard.sock"
    async with serving(f"unix:{path}") as (newer, _):
        path.rename(tmp_path / "newer")
        async with serving(f"unix:{path}"):
            path.unlink()
            (tmp_path / "newer").rename(path)
        await use(newer, f"unix:{path}")
    assert not path.exists()


async def test_a_listener_closed_twice_removes_nothing_the_second_time(tmp_path: Path) -> None:
    path = tmp_path / "shard.sock"
    (listener,) = await open_listeners(UnixAddress(str(path)), has_token=False, ssl_context=None, insecure=False)
    before = path.stat().st_ino
    await listener.aclose()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        if path.stat().st_ino != before:
            pytest.skip("this file system gave the other socket an inode number of its own")
        await listener.aclose()
        assert path.is_socket()


async def test_tls() -> None:
    async with serving("127.0.0.1:0", ssl_context=server_context()) as (rig, (where,)):
        await use(rig, where, ssl_context=client_context())
        with pytest.raises(ConnectionLost, match=r"(?i)certificate"):
            await use(rig, where, ssl_context=client_context("stranger.pem"))
        with pytest.raises(ConnectionLost):
            await use(rig, where)  # in plain text
        await use(rig, where, ssl_context=client_context())


async def test_tls_with_client_certificates() -> None:
    async with serving("127.0.0.1:0", ssl_context=server_context(client_certificates=True)) as (rig, (where,)):
        await use(rig, where, ssl_context=client_context(certificate="client.pem"))
        with pytest.raises(ConnectionLost):
            await use(rig, where, ssl_context=client_context())
        await use(rig, where, ssl_context=client_context(certificate="client.pem"))


@pytest.mark.parametrize("where", ["0.0.0.0:0", "[::]:0"])
async def test_beyond_loopback_a_token_and_tls_are_needed(where: str) -> None:
    async with open_rig() as rig:
        with pytest.raises(InvalidInput, match="there is no token"):
            await rig.server.serve(where, insecure=True)
        with pytest.raises(InvalidInput, match="there is no token"):
            await rig.server.serve("127.0.0.1:0", where, ssl_context=server_context())
    async with open_rig(tokens=[ALICE]) as rig:
        with pytest.raises(InvalidInput, match="without TLS"):
            await rig.server.serve(where)


async def test_insecure_is_possible_for_who_says_so() -> None:
    async with serving("0.0.0.0:0", tokens=[ALICE], insecure=True) as (rig, (where,)):
        await use(rig, where.replace("0.0.0.0", "127.0.0.1"), token=ALICE)
    async with serving("0.0.0.0:0", tokens=[ALICE], ssl_context=server_context()) as (rig, (where,)):
        local = where.replace("0.0.0.0", "127.0.0.1")
        await use(rig, local, token=ALICE, ssl_context=client_context())


async def test_a_token_does_not_travel_in_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    from hotkv_trio.serve import _addresses

    async with serving("127.0.0.1:0", tokens=[ALICE]) as (rig, (where,)):
        monkeypatch.setattr(_addresses, "is_loopback", lambda host: False)
        with pytest.raises(InvalidInput, match="plain text"):
            await use(rig, where, token=ALICE)
        await use(rig, where, token=ALICE, insecure=True)


async def test_listeners_of_the_callers_own() -> None:
    async with open_rig() as rig, trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        names = await nursery.start(rig.server.serve, *listeners)
        await use(rig, names[0])
        nursery.cancel_scope.cancel()
    async with open_rig() as rig:
        with pytest.raises(InvalidInput, match="an address or a listener"):
            await rig.server.serve()


async def test_nobody_there() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    await listener.aclose()
    with pytest.raises(ConnectionLost, match=rf"cannot connect to 127.0.0.1:{port}: Connection refused$"):
        async with open_shard_client(f"127.0.0.1:{port}"):
            pytest.fail("connected")


async def test_who_speaks_tls_where_it_is_not_spoken_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hotkv_trio")
    async with serving("127.0.0.1:0") as (rig, (where,)):
        with pytest.raises(ConnectionLost, match=f"cannot connect to {where}: it does not speak TLS"):
            await use(rig, where, ssl_context=client_context())
        await until(lambda: rig.server.statistics().dropped)
    assert vars(caplog.records[0])["reason"] == "the peer is no client of shards, it speaks TLS"


@pytest.mark.parametrize("encrypted", [False, True])
async def test_who_does_not_speak_tls_where_it_is_needed_is_told(
    caplog: pytest.LogCaptureFixture, *, encrypted: bool
) -> None:
    """Nor shows a certificate."""
    caplog.set_level(logging.INFO, "hotkv_trio")
    wanted = "(?i)certificate" if encrypted else "it may want TLS"
    async with serving("127.0.0.1:0", ssl_context=server_context(client_certificates=True)) as (rig, (where,)):
        with pytest.raises(ConnectionLost, match=wanted):
            await use(rig, where, ssl_context=client_context() if encrypted else None)
        await until(lambda: rig.server.statistics().dropped)
    why = "PEER_DID_NOT_RETURN_A_CERTIFICATE" if encrypted else "WRONG_VERSION_NUMBER"
    assert why in vars(caplog.records[0])["reason"]


async def test_a_server_of_something_else_is_told_apart() -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
        with pytest.raises(ProtocolError, match="the peer is no shard server, it speaks HTTP"):
            async with open_shard_client(f"127.0.0.1:{listener.socket.getsockname()[1]}"):
                pytest.fail("welcome")
        nursery.cancel_scope.cancel()


async def test_a_killed_tcp_client_is_noticed_at_once() -> None:
    async with serving("127.0.0.1:0") as (rig, (where,)):
        host, port = where.split(":")
        stream = await trio.open_tcp_stream(host, int(port))
        async with open_shard_client(stream) as client:
            session = await client.start_session(key("a"))
            await session.prefill([1])
            assert rig.lent == 1
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            await trio.aclose_forcefully(stream)
            await until(lambda: not rig.lent)
            with pytest.raises(ConnectionLost):
                await session.decode(2)
