"""TLS as options say it: PEM files."""

from __future__ import annotations

import contextlib
import ssl
from typing import TYPE_CHECKING

from hotkv_trio._cli._advice import advising
from hotkv_trio._errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

_CHAIN = "a certificate chain with its key"
_AUTHORITY = "an authority's certificate"


@contextlib.contextmanager
def _reading(file: Path, what: str) -> Generator[None]:
    """Say which file an error of ssl is about: it does not."""
    with advising(f"a PEM file that can be read, with {what}"):
        try:
            yield
        except ssl.SSLError as error:
            why = f": {error.reason.replace('_', ' ').lower()}" if error.reason else ""
            raise InvalidInput(f"{file} is no PEM file with {what}{why}") from error
        except OSError as error:
            error.filename = str(file)
            raise


def server_context(certificate: Path | None, client_authority: Path | None) -> ssl.SSLContext | None:
    """Return the context of a server; None without a certificate.

    Raises:
        InvalidInput: clients shall show certificates, and there is none for TLS; or a file holds none.
        OSError: a file cannot be read.
    """
    if certificate is None:
        if client_authority is not None:
            with advising("--certificate FILE as well, with the server's own certificate and its key"):
                raise InvalidInput("--client-authority without --certificate: there would be no TLS at all")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with _reading(certificate, _CHAIN):
        context.load_cert_chain(certificate)
    if client_authority is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        with _reading(client_authority, _AUTHORITY):
            context.load_verify_locations(client_authority)
    return context


def client_context(authority: Path | None, certificate: Path | None) -> ssl.SSLContext | None:
    """Return the context of a client; None without an authority to trust.

    Raises:
        InvalidInput: a certificate shall be shown, and there is no authority for TLS; or a file holds none.
        OSError: a file cannot be read.
    """
    if authority is None:
        if certificate is not None:
            with advising("--authority FILE as well, with the certificate that the servers' are signed by"):
                raise InvalidInput("--certificate without --authority: there would be no TLS at all")
        return None
    with _reading(authority, _AUTHORITY):
        context = ssl.create_default_context(cafile=str(authority))
    if certificate is not None:
        with _reading(certificate, _CHAIN):
            context.load_cert_chain(certificate)
    return context
