"""Read training text: files become documents of a domain, some of which are held out. Torch-free.

A domain is what a text is about: a name, given as `name:path` or taken from the file. Whole documents are held out, and
equal documents count once, in whichever domain they lie: so none is trained on and held out.
"""

from __future__ import annotations

import hashlib
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config import ConfigError
from harness.workload.files import file_rows

PYTHON, PYTHON_DOCS = "python", "python-docs"  # as paths: Python's own source and its documentation
_NAMED = re.compile(r"([\w-]+)[:=](.+)")  # in a list, Hydra takes = between quotes only
_PLAIN = (".txt", ".md", ".rst")
_SUFFIXES = (*_PLAIN, ".py", ".jsonl")
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"}
_PASSAGE_CHARS = 2_000  # prose without other bounds is cut at blank lines into passages of about this length
_PROMPT_SHARE = 3  # the first third of a document that has no question is its prompt
# Fields of rows in known formats: the prompt, then what follows it. Others: all texts of the row, one after another.
_KNOWN = (("question", "answer"), ("prompt", "canonical_solution"))


@dataclass(frozen=True)
class Document:
    """A text that is trained on, or held out, as a whole. Its first `prompt_chars` characters are the prompt."""

    text: str
    prompt_chars: int

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())

    @property
    def key(self) -> str:
        """The digest of its words: equal for texts that differ in white space alone."""
        return hashlib.sha256(" ".join(self.text.split()).encode()).hexdigest()


@dataclass
class Source:
    """A file or folder that text came from, for the records: without the place where it lay."""

    domain: str
    name: str
    sha256: str
    num_bytes: int
    held_out: bool


@dataclass
class Domain:
    """The documents of one domain, in an order that depends on the seed and on their texts alone."""

    name: str
    training: list[Document] = field(default_factory=list)
    held_out: list[Document] = field(default_factory=list)


def read_domains(
    text: Sequence[str], held_out: Sequence[str], *, share: float, max_bytes: int, seed: int
) -> tuple[list[Domain], list[Source]]:
    """Read and divide all text. A domain with files in `held_out` holds out their documents; any other one, `share` of
    its bytes. Raises ConfigError for what cannot be read, or divided."""
    sources: list[Source] = []
    given = _documents(text, "text", sources, held_out=False)
    kept_out = _documents(held_out, "held_out", sources, held_out=True)
    if unknown := sorted(set(kept_out) - set(given)):
        raise ConfigError("held_out", f"'{unknown[0]}' is no domain of text: {', '.join(given)}")
    seen: set[str] = set()
    domains = {name: Domain(name) for name in given}
    for name, documents in kept_out.items():
        domains[name].held_out = _first(_distinct(documents, seen, seed), max_bytes)
    for name, documents in given.items():
        domain, distinct = domains[name], _first(_distinct(documents, seen, seed), max_bytes)
        if name not in kept_out:
            domain.held_out = _first(distinct, int(share * sum(each.num_bytes for each in distinct)))
            distinct = distinct[len(domain.held_out) :]
        domain.training = distinct
        if not domain.training:
            raise ConfigError("text", f"'{name}' has too little text: a document to hold out and one to train on")
    return list(domains.values()), sources


def _distinct(documents: Iterable[Document], seen: set[str], seed: int) -> list[Document]:
    """Return documents that are in none of the domains before, in random order."""
    found = {}
    for document in documents:
        if document.key not in seen:
            found[document.key] = document
    seen.update(found)  # in place: the caller's next domain must know
    keys = sorted(found)
    random.Random(seed).shuffle(keys)
    return [found[key] for key in keys]


def _first(documents: Sequence[Document], num_bytes: int) -> list[Document]:
    """Return documents from the front while they have at most `num_bytes`, at least one."""
    taken: list[Document] = []
    so_far = 0
    for document in documents:
        so_far += document.num_bytes
        if taken and so_far > num_bytes:
            break
        taken.append(document)
    return taken


def _documents(
    items: Sequence[str], option: str, sources: list[Source], *, held_out: bool
) -> dict[str, list[Document]]:
    found: dict[str, list[Document]] = {}
    for item in items:
        named = _NAMED.fullmatch(item)
        name, path = (named[1], named[2]) if named else (Path(item).stem, item)
        if not name.strip() or not path.strip():
            raise ConfigError(option, f"must be a file or name:file, got '{item}'")
        read = list(_of_path(path, option))
        sources.append(_source(name, path, read, held_out=held_out))
        found.setdefault(name, []).extend(read)
    return found


def _source(domain: str, path: str, read: Sequence[Document], *, held_out: bool) -> Source:
    """Describe where text came from: a file by its own bytes, anything else by those of its documents."""
    file = Path(path).expanduser()
    is_file = path not in (PYTHON, PYTHON_DOCS) and file.is_file()
    content = file.read_bytes() if is_file else b"\0".join(document.text.encode() for document in read)
    shown = file.name if path not in (PYTHON, PYTHON_DOCS) else path
    return Source(domain, shown, hashlib.sha256(content).hexdigest(), len(content), held_out)


def _of_path(path: str, option: str) -> Iterator[Document]:
    if path == PYTHON:
        library = Path(sysconfig.get_path("stdlib"))
        files = (
            each for each in sorted(library.rglob("*.py")) if not _NOT_LIBRARY & set(each.relative_to(library).parts)
        )
        return _all_of(files, option, is_library=True)
    if path == PYTHON_DOCS:
        from pydoc_data.topics import topics

        return (each for text in topics.values() for each in _passages(text))
    place = Path(path).expanduser()
    if place.is_dir():
        return _all_of((e for e in sorted(place.rglob("*")) if e.suffix in _SUFFIXES and e.is_file()), option)
    if not place.is_file():
        raise ConfigError(option, f"no such file: '{path}'")
    if place.suffix not in _SUFFIXES:
        raise ConfigError(option, f"must name {', '.join(_SUFFIXES)} files or a folder of them, got '{path}'")
    return _all_of([place], option)


def _all_of(files: Iterable[Path], option: str, *, is_library: bool = False) -> Iterator[Document]:
    for file in files:
        if file.suffix == ".jsonl":
            yield from _rows(file, option)
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            if is_library:  # some of its files are in other encodings, on purpose
                continue
            raise ConfigError(option, f"{file.name} is not UTF-8 text: {error.reason}") from error
        except OSError as error:
            raise ConfigError(option, f"cannot read '{file}': {error.strerror or error}") from error
        if file.suffix == ".py":
            if text.strip():
                yield _document(text)
        else:
            yield from _passages(text)


def _rows(file: Path, option: str) -> Iterator[Document]:
    try:
        for where, row in file_rows(str(file)):
            prompt, rest = _of_row(row)
            if not prompt.strip() and not rest.strip():
                raise ConfigError(option, f"{where} has no text in any column")
            yield Document(prompt + rest, len(prompt)) if rest and prompt else _document(prompt + rest)
    except ConfigError as error:
        raise ConfigError(option, error.message) from None


def _of_row(row: Any) -> tuple[str, str]:
    """Return a row's prompt and what follows it."""
    for first, second in _KNOWN:
        if isinstance(row.get(first), str) and isinstance(row.get(second), str):
            between = "" if row[first].endswith("\n") else "\n"
            return row[first] + between, row[second]
    if isinstance(row.get("instruction"), str) and isinstance(row.get("instances"), list):
        examples = [each for each in row["instances"] if isinstance(each, dict)]
        rest = (str(each.get(part) or "") for each in examples for part in ("input", "output"))
        return row["instruction"] + "\n", "\n".join(text for text in rest if text)
    return "\n".join(_texts(row)), ""


def _texts(value: Any) -> Iterator[str]:
    """Yield every text of a row, however it is nested."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _passages(text: str) -> Iterator[Document]:
    """Cut prose at blank lines."""
    passage = ""
    for paragraph in text.split("\n\n"):
        if not paragraph.strip():
            continue
        passage = f"{passage}\n\n{paragraph}" if passage else paragraph
        if len(passage) >= _PASSAGE_CHARS:
            yield _document(passage)
            passage = ""
    if passage:
        yield _document(passage)


def _document(text: str) -> Document:
    """Make a document whose prompt is its first third, up to the end of a line where there is one."""
    third = max(1, len(text) // _PROMPT_SHARE)
    line_end = text.find("\n", third)
    return Document(text, line_end + 1 if 0 < line_end < 2 * third else third)
