"""Check that docstrings begin with one plain sentence: it has a verb, names its noun, stands alone and is short."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

MAX_WORDS = 25
FOLDERS = ("harness", "strategies", "kernels", "benchmarks", "paper_figures", "tests")

# Words that open a sentence which needs the one before it, or no sentence at all.
BANNED = """
    And Or But Nor So Of Those That These This Its It They Same Without With Beside Besides Beyond Else Not None Neither
    What Which Who Whom Whose Whoever Whatever How Where Whether When Why While Also As By For From In On At Over To
    Likewise Ditto Otherwise Then There Here
""".split()
# Verbs that may open the docstring of a function, as "Return" or "Returns". A new verb is added here.
VERBS = """
    accept accumulate act add adjust admit adopt advance allocate allow answer append apply arrange ask assemble
    assert assign assume attach attend await begin behave bind block bring build calibrate call cancel carry cast
    catch change charge check choose claim classify clean clear close collect combine compare compile complete
    compose compress compute continue contribute convert copy count create cut decide declare decode decompress
    define deliver depend derive describe discard display divide do double download draw drive drop emit emulate
    enable encode end enforce enqueue ensure enter enumerate estimate evaluate evict exchange execute exercise exit
    expand expect explain expose express extend fail fall feed fetch fill find finish fit flatten fold follow forget
    format free gather generate get give go group grow halve hand handle hash help hide hold identify ignore imagine
    implement import index insert inspect install interrupt issue iterate join judge keep know last launch lay lead
    leave let lie limit link list load lock log look loop lose make map mark mask match maximise measure meet merge
    minimise model move multiply name need normalise note notice observe offer open order overlap override own pace
    pack pad pair parse pass pause permute pick pin place plan play poison post predict prefer prefetch prepare
    print probe produce project protect prove provide pull push put quantise queue raise reach read rebuild receive
    recompute record recover reduce refer refuse register reject release remember remove rename render repeat
    replace replay report represent request require reserve reset resolve restore restrict resume retry return
    rotate round route run sample save say scale scan scatter schedule search see select send separate serve set
    settle shift shorten show shuffle simulate sketch skip sleep solve sort spend split spread stage stand start
    state stay stop store stream stretch stub submit sum summarise supply swap switch take tell test tie time trace
    track train translate treat try turn unpack update upload use validate verify view wait wake walk warm watch weigh
    widen withdraw work wrap write yield
""".split()
AUXILIARIES = "is are was were has have does do can cannot could may might must will would should".split()


def third_person(verb: str) -> str:
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return f"{verb[:-1]}ies"
    return f"{verb}es" if verb.endswith(("s", "sh", "ch", "x", "z", "o")) else f"{verb}s"


# Third-person forms that are more often the plural of a noun: "Spans of a pass" has no verb.
PLURALS = """
    blocks copies costs counts groups limits links lists loads marks matches models names overrides passes places
    plans records reports requests routes runs samples scales searches sizes spans stages tests times totals traces
    units uses
""".split()
THIRD_PERSON = {third_person(verb) for verb in VERBS} - set(PLURALS)


def first_sentence(docstring: str) -> str:
    paragraph = " ".join(re.split(r"\n\s*\n", docstring.strip())[0].split())
    return re.split(r"(?<=[.?!])(?<!e\.g\.)(?<!i\.e\.)(?<!Eq\.)(?<!Fig\.)(?<!vs\.)(?<!Sec\.)\s", paragraph)[0]


def faults(kind: str, docstring: str) -> list[str]:
    """Name what breaks the rule in a docstring of a "module", "class", "function" or "property"."""
    sentence = first_sentence(docstring)
    words = [word.strip("(),.:;?!\"'`") for word in sentence.split() if any(c.isalnum() for c in word)]
    found = []
    if len(words) > MAX_WORDS:
        found.append(f"{len(words)} words, more than {MAX_WORDS}")
    first = words[0] if words else ""
    if first in BANNED or sentence.startswith(("The same", "One of", "Each of", "(", "[")):
        return [*found, f'opens with "{first}"']
    opens = first.lower() in VERBS or first.lower() in THIRD_PERSON
    opens = opens and words[1:2] != ["of"] and not sentence.startswith("`")  # "Sum of a column" has no verb
    if kind == "function":
        return found if opens else [*found, f'opens with "{first}", which is no known verb']
    if len(words) < 3:
        return [*found, "fewer than 3 words"]
    stands = kind == "property" or first in ("A", "An", "The", "One", "Each", "Every")
    if not (opens or stands or any(word in AUXILIARIES or word in THIRD_PERSON for word in words)):
        found.append("has no known verb")
    return found


def docstrings(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield kind, line and text of each docstring of a file."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (text := ast.get_docstring(node)) is None:
            continue
        if isinstance(node, ast.Module | ast.ClassDef):
            kind = type(node).__name__.lower().removesuffix("def")
        else:
            names = {name.id for d in node.decorator_list for name in ast.walk(d) if isinstance(name, ast.Name)}
            kind = "property" if names & {"property", "cached_property"} else "function"
        yield kind, node.body[0].lineno, text


def checked() -> Iterator[Path]:
    """Yield the product's files, and those of the tests that hold helpers and no tests."""
    for path in (ROOT / "run.py", *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("tests/") and path.name.startswith("test_"):
            continue
        yield path


def test_every_docstring_begins_with_one_plain_sentence():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {fault}: {first_sentence(text)}"
        for path in checked()
        for kind, line, text in docstrings(path)
        for fault in faults(kind, text)
    ]
    assert not found, f"{len(found)}\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("kind", "docstring"),
    [
        ("class", "And back."),
        ("class", "Of all that a `WeightStore` holds, or of its layers, or its ends (embedding and head), alone."),
        (
            "class",
            "The same, but each GPU has a cache of its own in its memory, for sequences of its own: these caches.",
        ),
        ("class", "Values: a cache of their own."),
        ("module", "Facts about the processor and the calling thread."),
        ("module", "Typed."),
        ("function", "Of so many bytes on each GPU of the engine."),
        ("function", "The same of the padding of those that have any, from the block in which it begins."),
        ("function", "The paged kernel: q and out [decode, heads, head_dim]."),
        ("function", "Share of the window."),
        ("function", "Sum of a column, by the overlap of each packet with the window."),
        ("function", "Spans of a pass in the middle of the run."),
        ("property", "Of this tier, and of what it lies within."),
        ("function", "Return " + "one, " * MAX_WORDS + "and so on."),
    ],
)
def test_the_rule_refuses_what_reads_badly(kind: str, docstring: str):
    assert faults(kind, docstring)


@pytest.mark.parametrize(
    ("kind", "docstring"),
    [
        ("class", "A share of the device's blocks, which its holder gives back by number."),
        ("module", "Copy at an emulated link's speed, and wait without the GIL."),
        ("function", "Returns the bytes of one layer's experts, e.g. for a plan. Of a dense layer, 0."),
        ("property", "The bytes that the cache may take."),
    ],
)
def test_the_rule_accepts_plain_sentences(kind: str, docstring: str):
    assert not faults(kind, docstring)
