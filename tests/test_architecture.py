"""The rules of docs/architecture.md that can be read off the source, so that they stay true."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.conftest import ROOT
from tests.quick import QUICK

PACKAGES = ("harness", "strategies", "kernels")
TOP_LEVEL_FOLDERS = {
    "conf",
    "harness",
    "strategies",
    "kernels",
    "tests",
    "benchmarks",
    "paper_figures",
    "docs",
    "results",
}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 70

# run -> experiment -> strategies -> engine -> machine, memory, model -> kernels. A row is a module or package, without
# the parts of it that have a row of their own; modules of one row may import each other.
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "harness": set(),
    "harness.config": set(),
    "harness.interrupts": set(),
    "harness.cli.arguments": {"harness", "harness.config"},
    "harness.hardware.constants": {"harness.config"},
    "harness.hardware.profile": {"harness.config", "harness.hardware.constants", "harness.memory.tiers"},
    "harness.memory.tiers": {"harness.config"},
    "harness.workload": {"harness.config"},
    "harness.model": {"harness.config", "kernels"},
    "harness.machine": {
        *("harness.config", "harness.hardware.profile", "harness.memory.tiers", "harness.model", "kernels"),
    },
    "harness.memory": {"harness.machine", "harness.memory.tiers", "harness.model"},
    "harness.hardware": {  # what measures machines and fits their constants
        *("harness.config", "harness.hardware.constants", "harness.hardware.profile", "harness.machine"),
        *("harness.model", "kernels"),
    },
    "harness.record": {"harness", "harness.cli.arguments", "harness.config", "harness.interrupts", "harness.machine"},
    "harness.engine": {
        *("harness.config", "harness.machine", "harness.memory", "harness.memory.tiers", "harness.model"),
        *("harness.record", "harness.workload", "kernels"),
    },
    "harness.bench": {  # times ops
        *("harness.engine", "harness.machine", "harness.memory", "harness.memory.tiers", "harness.model"),
        "harness.workload",
    },
    "harness.verify": {"harness.model", "harness.engine"},
    "harness.routing": {
        *("harness.cli.arguments", "harness.config", "harness.interrupts", "harness.record", "kernels"),
    },
    "harness.routing.activations": {"harness.config", "harness.routing"},  # of runs before
    "harness.study": {  # of recorded routing
        *("harness.cli.arguments", "harness.config", "harness.interrupts", "harness.memory", "harness.model"),
        *("harness.record", "harness.routing"),
    },
    "harness.settings": {
        *("harness.config", "harness.hardware.profile", "harness.model", "harness.record", "harness.routing"),
        "harness.workload",
    },
    "strategies": {
        *("harness.bench", "harness.config", "harness.engine", "harness.machine", "harness.memory"),
        *("harness.memory.tiers", "harness.model", "harness.routing.activations", "harness.workload"),
    },
}
# What puts a run together, from settings to records, and what stands on it: each may import all before it.
for _row in ("cli.overrides", "run.session", "calibration", "run", "plan", "validate"):
    MAY_IMPORT[f"harness.{_row}"] = {row for row in MAY_IMPORT if row.startswith("harness")}
MAY_IMPORT["harness.calibration"].add("kernels")  # whose times it takes
MAY_IMPORT["harness.record.compare"] = {"harness.cli.overrides", "harness.record", *MAY_IMPORT["harness.record"]}
MAY_IMPORT["harness.hardware.calibrate"] = MAY_IMPORT["harness.run"]
MAY_IMPORT["run"] = {"harness.config", "harness.run", "harness.record.compare", *MAY_IMPORT["harness.run"]}

MAY_IMPORT["harness.training"] = {  # nothing imports it
    *("harness.cli.arguments", "harness.cli.overrides", "harness.config", "harness.interrupts", "harness.model"),
    *("harness.record", "harness.workload"),
}

MAY_IMPORT["harness.llapor"] = {  # learns from what the study reads, and predicts on the engine
    *MAY_IMPORT["harness.study"],
    *("harness.cli.overrides", "harness.engine", "harness.machine", "harness.memory.tiers", "harness.study"),
}
MAY_IMPORT["strategies"].add("harness.llapor")

# Planning and bookkeeping: importing these never imports torch.
TORCH_FREE = (
    *("harness.config", "harness.settings", "harness.hardware.profile", "harness.record.*", "harness.workload.*"),
    *("harness.bench.shapes", "harness.routing.*", "harness.study.*"),
    *("harness.model.spec", "harness.model.layout", "harness.model.config", "harness.memory.*"),
    *("harness.machine.base", "harness.machine.hazards", "harness.machine.queues", "harness.verify.records"),
    *("harness.machine.recording", "harness.machine.critical_path"),
    *("harness.engine.sequences", "harness.engine.batch", "harness.engine.strategy", "harness.engine.limits"),
    *("strategies.*.config", "strategies.common.*_batches", "strategies.*.equations"),
    *("strategies.offloading.planning.policy", "strategies.offloading.planning.search"),
    *("strategies.offloading.request_batching", "strategies.common.workload_shape", "strategies.moegen.policy"),
    *("strategies.moegen.memory", "strategies.moegen.scheduler", "strategies.common.waiting"),
    *("strategies.expert_offload.placement", "strategies.expert_offload.policies", "strategies.fate.sizes"),
    *("strategies.hybrimoe.schedule", "strategies.klotski.planner", "strategies.klotski.correlation"),
    "strategies.prescope.presched",
    *("harness.llapor.settings", "harness.llapor.shape", "harness.llapor.files", "harness.llapor.examples"),
    "harness.llapor.groups",
    *("harness.training.settings", "harness.training.schedule", "harness.training.texts"),
)
TORCH = {"torch", "transformers"}


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in (ROOT / "run.py", *sources(*PACKAGES))}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def parts_of(node: ast.AST) -> Iterator[ast.AST]:
    """What a node is made of, but for expressions: they are most of a file and hold neither imports nor functions."""
    return (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))


def functions_in(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in parts_of(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        yield from functions_in(child)


@cache
def imports(module: str, *, for_types: bool = False) -> frozenset[tuple[str, bool]]:
    """(what it imports, whether only inside functions); what only type checkers see is left out but `for_types`."""
    found: set[tuple[str, bool]] = set()

    def visit(node: ast.AST, deferred: bool) -> None:
        for child in parts_of(node):
            if isinstance(child, ast.Import):
                found.update((alias.name, deferred) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{module} imports relatively: `from {'.' * child.level}{child.module or ''}`"
                for alias in child.names:  # `from package import module` imports the module
                    whole = f"{child.module}.{alias.name}"
                    found.add((whole if whole in MODULES else str(child.module), deferred))
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                visit(ast.Module([*child.orelse, *(child.body if for_types else ())], []), deferred)
            else:
                visit(child, deferred or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(tree_of(MODULES[module]), deferred=False)
    return frozenset(found)


def row_of(module: str) -> str:
    """The most specific row of MAY_IMPORT that a module belongs to; harness itself is no home for modules."""
    rows = [row for row in MAY_IMPORT if module == row or module.startswith(f"{row}.")]
    row = max(rows, key=len)
    assert row != "harness" or module == "harness", f"{module} belongs to no row of MAY_IMPORT"
    return row


def allowed(importer: str, imported: str) -> bool:
    here, there = row_of(importer), row_of(imported)
    return here == there or there in MAY_IMPORT[here]


def ours(module: str) -> bool:
    return module.split(".")[0] in (*PACKAGES, "run")


def test_the_rules_themselves_go_one_way():
    order = list(TopologicalSorter(MAY_IMPORT).static_order())  # raises CycleError
    assert order.index("kernels") < order.index("harness.machine") < order.index("harness.engine")
    assert order.index("harness.engine") < order.index("harness.run") < order.index("run")
    assert order.index("harness.engine") < order.index("strategies")
    assert not [row for row, others in MAY_IMPORT.items() if "strategies" in others]


def test_imports_go_one_way():
    found = [(module, imported) for module in MODULES for imported, _ in imports(module) if ours(imported)]
    assert len(found) > len(MODULES)
    assert [f"{module} must not import {imported}" for module, imported in found if not allowed(module, imported)] == []


# Rooms in strategies/ which belong to a family of systems, and the packages that share each.
FAMILY_ROOMS: dict[str, set[str]] = {
    "offloading": {"moelightning", "fastdecode", "flexgen", "flexgen_c"},
    "expert_offload": {"prescope", "expert_cache", "fiddler", "fate", "hybrimoe", "klotski"},
}
SHARED_ROOMS = {"common", *FAMILY_ROOMS}


def may_share(package: str, other: str) -> bool:
    """Return whether a package of strategies/ may import from another one: from the common parts, or its family's."""
    return other in (package, "common") or package in FAMILY_ROOMS.get(other, ())


def test_strategies_share_only_the_common_parts_and_the_room_of_their_family():
    shared = {
        (module.split(".")[1], imported.split(".")[1])
        for module in MODULES
        if module.startswith("strategies.")
        for imported, _ in imports(module)
        if imported.startswith("strategies.")
    }
    assert [f"{package} must not import {other}" for package, other in shared if not may_share(package, other)] == []
    listed = {(package, room) for room, packages in FAMILY_ROOMS.items() for package in packages}
    assert listed <= shared, "a package that is listed for a room uses it"


def test_the_harness_names_no_strategy():
    """Adding a strategy changes nothing else: no enum, no registry, no `if name ==`."""
    packages = {path.parent.name for path in (ROOT / "strategies").glob("*/__init__.py")}
    names = packages - SHARED_ROOMS
    assert names and packages >= SHARED_ROOMS
    pattern = re.compile(rf"\b({'|'.join(sorted(names))})\b")
    for path in (*sources("harness", "kernels", "strategies/common"), *(ROOT / "kernels").rglob("*.cpp")):
        found = pattern.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path.relative_to(ROOT)} names the strategy {found and found[0]}"


def needed_at_import(module: str) -> set[str]:
    """Everything that importing a module imports. A strategy's __init__ is left out: it puts all its parts together."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in MODULES:
            todo += [imported for imported, deferred in imports(name) if not deferred]
        parent = name.rpartition(".")[0]
        if parent and not name.startswith("strategies."):
            todo.append(parent)
    return seen


def reachable(start: str) -> set[str]:
    """Return the modules that lead on from one, imports for types and those within functions included."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = {name for name, _ in imports(waiting.pop(), for_types=True) if name in MODULES} - found
        found |= new
        waiting += new
    return found


def test_no_module_leads_back_to_itself():
    beyond = {module: reachable(module) for module in MODULES}
    circles = {
        frozenset({module, *(other for other in beyond[module] if module in beyond[other])})
        for module in MODULES
        if module in beyond[module]
    }
    assert not circles


def test_planning_and_bookkeeping_need_no_torch():
    for pattern in TORCH_FREE:
        chosen = [m for m in MODULES if re.fullmatch(re.escape(pattern).replace(r"\*", r"[a-z_0-9.]+"), m)]
        assert chosen, f"{pattern} matches no module"
        for module in chosen:
            assert not needed_at_import(module) & TORCH, f"{module} imports torch"


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without the docstring: contracts may be long."""
    first = function.body[0]
    docstring = ast.get_docstring(function) is not None
    skipped = (first.end_lineno or 0) - first.lineno + 1 if docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - skipped


def test_files_and_functions_stay_short():
    long: dict[str, int] = {}
    for path in (ROOT / "run.py", *sources(*PACKAGES, "tests", "benchmarks")):
        text, module = path.read_text(encoding="utf-8"), module_name(path)
        if (num_lines := text.count("\n")) > MAX_FILE_LINES:
            long[module] = num_lines
        functions = functions_in(tree_of(path))
        long |= {f"{module}.{f.name}": code_lines(f) for f in functions if code_lines(f) > MAX_FUNCTION_LINES}
    assert long == {}


def test_quick_tests_are_of_every_room_of_the_harness():
    texts = [(ROOT / "tests" / path).read_text(encoding="utf-8") for path in QUICK]
    rooms = {module.split(".")[1] for module in MODULES if module.count(".") > 1 and module.startswith("harness.")}
    assert len(rooms) > 5
    imported = {room for text in texts for room in re.findall(r"^from harness\.(\w+)", text, re.MULTILINE)}
    assert sorted(rooms - imported) == [], "tests/quick.py names no test of these"


def test_kernel_sources_stay_short():
    for path in (*(ROOT / "kernels").rglob("*.cpp"), *(ROOT / "kernels").rglob("*.h")):
        assert path.read_text(encoding="utf-8").count("\n") <= MAX_FILE_LINES, path.name


def test_the_top_level_keeps_its_shape():
    made = re.compile(r"\..*|build|wandb|__pycache__|.*\.egg-info")  # by tools, and ignored by git
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not made.fullmatch(path.name)}
    assert folders <= TOP_LEVEL_FOLDERS
