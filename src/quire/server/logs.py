"""Logs: lines for people, or one JSON object per line for log collectors."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

TEXT, JSON = "text", "json"
FORMATS = (TEXT, JSON)
FIELDS = "fields"  # attribute of a record: further fields of its JSON


def fields(**values: Any) -> dict[str, Mapping[str, Any]]:
    """Return the `extra` argument of a logger's call that adds these fields to the line's JSON."""
    return {FIELDS: values}


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time, level, logger, message, its fields, and the exception's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in getattr(record, FIELDS, {}).items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logs(log_format: str) -> None:
    """Write the process's logs to standard error in this format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter() if log_format == JSON else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if log_format == JSON:
        logging.captureWarnings(True)
