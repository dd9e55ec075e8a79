"""Whatever a peer does is no defect of the server's: no test leaves a connection that ended by one in the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _no_connection_failed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert "a connection failed" not in [record.getMessage().partition(";")[0] for record in caplog.get_records("call")]
