"""How numbers of bytes are said."""

from __future__ import annotations


def size(n_bytes: int) -> str:
    """Return bytes to the byte, and rounded: ``98,362,432 B (93.8 MiB)``."""
    return f"{n_bytes:,} B" if n_bytes < 1024 else f"{n_bytes:,} B ({rounded_size(n_bytes)})"


def rounded_size(n_bytes: int) -> str:
    """Return bytes in the largest binary unit of which there is a whole one."""
    units = ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB"))
    return next((f"{n_bytes / 1024**n:,.1f} {unit}" for n, unit in units if n_bytes >= 1024**n), f"{n_bytes} B")
