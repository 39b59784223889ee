"""Draw recorded routing: `python -m paper_figures.routing [--studies FOLDER] [--out FOLDER]`.

Reads the studies in a folder, NAME.json and NAME-untrained.json as `python -m harness.study` wrote them, and draws
pictures with a column for each model; compared.md has them beside what papers publish. Both folders default to
results/reference/routing and results/figures/routing.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from harness.cli.arguments import CommandParser
from harness.config import ConfigError
from harness.interrupts import exit_code
from harness.model.cache import make_writable
from paper_figures.routing import compared, drawn
from paper_figures.routing.drawn import Column
from paper_figures.support import FIGURES, REFERENCE, read_json, save

UNTRAINED = "-untrained"
PICTURES = {
    "popularity": drawn.popularity,
    "drift": drawn.drift,
    "correlation": drawn.correlation,
    "groups": drawn.groups,
    "prediction": drawn.prediction,
    "caches": drawn.caches,
    "fits": drawn.fits,
}
NOTE = "routing of small models trained by harness.training, on held-out text; python -m harness.study"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("paper_figures.routing", __doc__)
    parser.add_argument("--studies", type=Path, default=REFERENCE / "routing", metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=FIGURES / "routing", metavar="FOLDER")
    return parser.run(_draw, arguments)


def _draw(given: Namespace) -> int:
    columns = columns_in(given.studies)
    make_writable(given.out, "--out")
    for name, draw in PICTURES.items():
        save(draw(columns), given.out / f"{name}.png", label="recorded", note=NOTE)
        print(given.out / f"{name}.png")
    (given.out / "compared.md").write_text(compared.page(columns), encoding="utf-8")
    print(given.out / "compared.md")
    return 0


def columns_in(folder: Path) -> list[Column]:
    """Read the studies of a folder. Raises ConfigError where there are none."""
    paths = [path for path in sorted(folder.glob("*.json")) if not path.stem.endswith(UNTRAINED)]
    if not paths:
        raise ConfigError("--studies", f"{folder}: has no NAME.json; python -m harness.study writes them")
    found = []
    for path in paths:
        control = path.with_name(f"{path.stem}{UNTRAINED}.json")
        study = read_json(path)
        found.append(Column(study["title"], study, read_json(control) if control.exists() else None))
    return found


if __name__ == "__main__":
    sys.exit(exit_code(main))
