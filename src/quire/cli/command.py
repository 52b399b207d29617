"""A command whose --help has a section for each group of options, and whose errors of parsing are plain."""

from __future__ import annotations

import re
from typing import Any

import typer
from pydantic import ValidationError
from typer.core import TyperCommand

WANTED = {"int": "an integer", "float": "a number", "bool": "true or false"}  # by pydantic's types of errors
LIST = re.compile(r"<list\[(\w+)\]>")


class Command(TyperCommand):
    """The class of all commands."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options. The heading of an option is that of its field, see `group_of`."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx)
            if record is not None:
                usual = "Arguments" if one.param_type_name == "argument" else "Options"
                title = getattr(one, "rich_help_panel", None) or usual
                sections.setdefault(title, []).append((LIST.sub(r"<\1>", record[0]), record[1]))
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. The message of an error states the value, and the kind of value that would be right."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if isinstance(error.__cause__, ValidationError):
                found = error.__cause__.errors()[0]
                wanted = WANTED.get(found["type"].partition("_")[0])
                error.message = f"{found['input']!r}; {f'it must be {wanted}' if wanted else error.message}"
            raise
