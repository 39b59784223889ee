"""What installing takes: every package is pinned, those that others bring too."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINES = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
PINS = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in LINES)}
NAMED = [*PROJECT["dependencies"], *(text for extra in PROJECT["optional-dependencies"].values() for text in extra)]


def test_a_pin_is_a_name_and_a_release():
    """No address, no local build, nothing twice, and no release that its makers call unfinished."""
    assert [
        line for line in LINES if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9]+(\.[0-9]+)*(\.?post[0-9]+)?", line)
    ] == []
    assert len(PINS) == len(LINES)


def test_every_dependency_is_pinned_to_a_version_that_is_allowed():
    for requirement in map(Requirement, NAMED):
        pinned = PINS.get(canonicalize_name(requirement.name))
        assert pinned is not None, f"constraints.txt lacks {requirement.name}"
        assert requirement.specifier.contains(pinned), f"{requirement} does not allow {pinned} of constraints.txt"


def test_what_they_bring_is_pinned_too():
    """Followed through the packages that are installed in their pinned version."""
    todo, seen = [(requirement.name, frozenset(requirement.extras)) for requirement in map(Requirement, NAMED)], set()
    while todo:
        name, extras = found = todo.pop()
        if found in seen:
            continue
        seen.add(found)
        pinned = PINS.get(canonicalize_name(name))
        assert pinned is not None, f"constraints.txt lacks {name}"
        try:
            installed = distribution(name)
        except PackageNotFoundError:  # of an extra that is not installed here
            continue
        if installed.version.partition("+")[0] == pinned:
            needs = map(Requirement, installed.requires or ())
            wanted = [r for r in needs if not r.marker or any(r.marker.evaluate({"extra": e}) for e in (*extras, ""))]
            todo += [(requirement.name, frozenset(requirement.extras)) for requirement in wanted]
    assert len(seen) > 40
