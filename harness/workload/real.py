"""Make prompts from a dataset file or from the hub."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from harness.config import ConfigError, is_unicode
from harness.workload.config import DatasetConfig
from harness.workload.files import file_label, file_rows
from harness.workload.fit import LengthLimits
from harness.workload.recipe import Row, prompt_text, shot_text
from harness.workload.tokens import Candidate, Tokenizer, tokenized


def real_candidates(
    config: DatasetConfig, tokenizer: Tokenizer | None, limits: LengthLimits
) -> tuple[Iterator[Candidate], str]:
    """Return prompts in the data's own order, and the data's label. Rows left out for being empty are noted in
    `limits`."""
    if tokenizer is None:
        raise ConfigError("path" if config.path else "use_hub", "real prompts need a tokenizer, and the model has none")
    if config.path is not None:
        rows, label = file_rows(config.path), file_label(config.path)
    else:
        from harness.workload.hub import hub_rows  # the only part that may need the network

        rows, label = hub_rows(config)
    return tokenized(_texts(config, rows, limits), tokenizer), label


def _texts(config: DatasetConfig, rows: Iterable[tuple[str, Row]], limits: LengthLimits) -> Iterator[tuple[str, str]]:
    """Yield (where, prompt with the worked examples in front) of every row that has a prompt."""
    shots: list[str] = []
    for where, row in rows:
        is_shot = len(shots) < config.num_shots
        text = shot_text(config, row, where) if is_shot else prompt_text(config, row, where)
        if text is not None and not is_unicode(text):
            raise ConfigError("path", f"{where} holds half a surrogate pair, which is no character")
        if text is None:
            if config.on_empty == "error":
                raise ConfigError("column", f"{where}: '{config.column}' is empty; on_empty=skip leaves such rows out")
            limits.counts["left out, empty"] += 1
        elif is_shot:
            shots.append(text)
        else:
            yield where, "".join(shots) + text
