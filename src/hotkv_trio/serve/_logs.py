"""Log records as lines, of JSON or of text: the message, and the fields that came with it."""

from __future__ import annotations

import datetime as dt
import json
import logging
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import MutableMapping

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class Log(logging.LoggerAdapter[logging.Logger]):
    """A logger whose records carry fields of its own and those of the call."""

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[object, MutableMapping[str, Any]]:
        """Add the fields."""
        kwargs["extra"] = {**(self.extra or {}), **kwargs.get("extra", {})}
        return msg, kwargs


@final
class JSONFormatter(logging.Formatter):
    """Formats a record as one line of JSON.

    ``time`` (ISO 8601, UTC), ``level``, ``logger`` and ``message``, then what was given as ``extra``, then
    ``exception`` if there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        fields: dict[str, object] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra_of(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


@final
class TextFormatter(logging.Formatter):
    """Formats a record as text for people, the fields behind the message as ``name=value``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end; lines more if there is a traceback."""
        fields = "".join(f" {name}={value!s}" for name, value in _extra_of(record).items())
        line = f"{_time_of(record)} {record.levelname} {record.name}: {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time_of(record: logging.LogRecord) -> str:
    return dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds")


def _extra_of(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}
