"""TLS as options say it: PEM files."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from hotkv_trio._cli._advice import advising

if TYPE_CHECKING:
    from pathlib import Path


def _pem(*files: Path | None) -> str:
    # An error of ssl does not say which file it is about.
    named = " and ".join(str(file) for file in files if file is not None)
    return f"PEM files in the place of {named}: a certificate chain with its key, and an authority's certificate"


def server_context(certificate: Path | None, client_authority: Path | None) -> ssl.SSLContext | None:
    """Return the context of a server; None without a certificate."""
    if certificate is None:
        return None
    with advising(_pem(certificate, client_authority)):
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate)
        if client_authority is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(client_authority)
    return context


def client_context(authority: Path | None, certificate: Path | None) -> ssl.SSLContext | None:
    """Return the context of a client; None without an authority to trust."""
    if authority is None:
        return None
    with advising(_pem(authority, certificate)):
        context = ssl.create_default_context(cafile=str(authority))
        if certificate is not None:
            context.load_cert_chain(certificate)
    return context
