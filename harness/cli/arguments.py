"""The one dialect of all `python -m` commands: argparse, mistakes in one line, and the same exit codes.

Options are written `--name value` and explained by `--help`, beside the module's own text. Where a command composes the
configuration, its positional arguments are overrides, `key=value` as on run.py's command line.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import NoReturn

from harness import __version__
from harness.config import ConfigError

FAILED, USAGE_ERROR = 1, 2  # exit codes; harness.interrupts has that of Ctrl-C
VERSION = f"moe-offload-harness {__version__}"
_ENDING = "Exit codes: 0 as asked, 1 it failed or does not fit, 2 bad input, 130 interrupted, 143 terminated."


class CommandParser(argparse.ArgumentParser):
    """The parser of `python -m MODULE`, or of a script named by its path, whose help begins with `text`.

    Options and positional arguments may be mixed. Options are never abbreviated, since the next one might begin alike.
    """

    def __init__(self, module: str, text: str | None) -> None:
        super().__init__(
            prog=f"python {module}" if module.endswith(".py") else f"python -m {module}",
            description=text, epilog=_ENDING, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        self.add_argument("--version", action="version", version=VERSION, help="tell the project's version and exit")

    def add_overrides(self) -> None:
        """Take the settings of conf/ as positional arguments, in `overrides`."""
        told = "settings of conf/, as on run.py's command line"
        self.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=told)

    def run(
        self,
        command: Callable[[argparse.Namespace], int],
        arguments: Sequence[str] | None,
        *mistakes: type[Exception],
    ) -> int:
        """Run `command` on the parsed `arguments` (those of the process where None), and return its exit code. A
        ConfigError, and the `mistakes` that a command names, are told in one line."""
        told: tuple[type[Exception], ...] = (ConfigError, *mistakes)
        words = sys.argv[1:] if arguments is None else arguments
        try:
            # Before argparse, which would miss a positional argument first and say nothing of the option.
            require_known_options(words, self._option_string_actions)
            return command(self.parse_intermixed_args(words))
        except told as error:
            print(f"error: {error}", file=sys.stderr)
            return USAGE_ERROR

    def error(self, message: str) -> NoReturn:
        """Raise argparse's complaint as a ConfigError that names the option and says what is valid."""
        if found := re.fullmatch(r"argument ([^:]+): (.*)", message, re.DOTALL):
            raise ConfigError(found[1], found[2])
        if found := re.fullmatch(r"the following arguments are required: (.*)", message):
            raise ConfigError(found[1], "missing; a value is needed")
        if found := re.fullmatch(r"unrecognized arguments: (.*)", message):
            raise ConfigError(found[1].split()[0], "not an argument of this command; see --help")
        raise ConfigError(self.prog, message)


def require_known_options(words: Iterable[str], known: Iterable[str]) -> None:
    """Raise a ConfigError for the first word that looks like an option and is none of the `known` ones.

    What follows a lone `--`, and what has a space in it, is no option to argparse.
    """
    valid = sorted(name for name in known if name.startswith("--"))
    for word in takewhile(lambda word: word != "--", words):
        given = word.partition("=")[0]
        if word.startswith("--") and " " not in word and given not in valid:
            close = difflib.get_close_matches(given, valid, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ConfigError(given, f"unknown; {hint}valid are {', '.join(valid)}")


def whole_number(at_least: int) -> Callable[[str], int]:
    """Return the `type` of an option that takes an integer of at least `at_least`."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) < at_least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {at_least}, got {text}")
        return int(text)

    return read
