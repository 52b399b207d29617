"""A command whose --help has a section for each group of options, and whose errors of parsing are plain."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand

WANTED = {"int": "an integer", "float": "a number", "bool": "true or false"}  # by the beginnings of kinds
CLICK = re.compile(r"'(.*)' is not a valid (\w+)\.?")  # the message of older releases of typer
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
        """Parse the arguments. An error shows the value with its option, and the kind of value that would be right."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            from pydantic import ValidationError  # slow

            value, kind = "", ""
            if isinstance(error.__cause__, ValidationError):
                found = error.__cause__.errors()[0]
                value, kind = str(found["input"]), found["type"]
            elif match := CLICK.fullmatch(error.message or ""):
                value, kind = match.groups()
            for beginning, wanted in WANTED.items():
                if kind.startswith(beginning) and error.param is not None:
                    error.message, error.param_hint = f"it must be {wanted}", f"'{error.param.opts[-1]} {value}'"
            raise
