"""The training itself goes step by step, with records on disk and checkpoints to resume from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.model.spec import ModelSpec
from harness.record.files import atomic_file
from harness.training.balancing import auxiliary_loss, load_figures, move_biases
from harness.training.checkpoints import Position, load_state, save_state
from harness.training.evaluation import held_out_losses, next_token_loss
from harness.training.model import WatchedRouters, model_to_train
from harness.training.optimiser import MasterAdamW
from harness.training.schedule import Schedule
from harness.training.settings import TrainingSettings
from harness.training.tokens import TokenStreams, batch, domain_shares, held_out_windows

METRICS_FILE = "metrics.jsonl"
MAX_FINITE_LOSS = 1e4


class Trainer:
    """A training holds its model, optimiser and position. `run` brings it to its end."""

    def __init__(self, settings: TrainingSettings, streams: list[TokenStreams], folder: Path) -> None:
        self.settings, self.streams, self.folder = settings, streams, folder
        point = settings.training
        self.model, self.spec = model_to_train(point.recipe, settings.seed)
        self.routers = WatchedRouters(self.model, self.spec)
        self.position = Position()
        self._optimiser = MasterAdamW(self.model, settings.weight_decay, settings.clip_norm)
        self._schedule = Schedule(
            peak=point.learning_rate,
            warmup_steps=settings.warmup_steps,
            decay_percent=settings.decay_percent,
            minutes=settings.minutes,
            num_steps=settings.steps,
        )
        self._shares: NDArray[np.float64] = domain_shares(streams, settings.evenness)
        most, length = settings.evaluate_windows, settings.sequence_tokens
        self.windows = {stream.name: held_out_windows(stream, most, length) for stream in streams}
        self._loads = torch.zeros(len(self.routers.modules), self.spec.num_experts, dtype=torch.int64)
        self._since_row: list[tuple[float, float]] = []  # loss and seconds of each step after the last row

    @property
    def tokens_seen(self) -> int:
        return self.position.step * self.settings.batch_sequences * self.settings.sequence_tokens

    @property
    def told(self) -> str:
        """The steps done, and of how many where that is settled."""
        of = "" if self._schedule.num_steps is None else f" of {self._schedule.num_steps}"
        return f"step {self.position.step}{of}"

    @property
    def progress(self) -> float:
        return self._schedule.progress(self.position.step, self.position.seconds)

    def resume(self, same: Mapping[str, Any]) -> bool:
        """Go on from the folder's checkpoint. Returns False where there is none, so that all steps are done again."""
        found = load_state(self.folder, dict(same))
        if found is None:
            self._forget_later_rows()
            return False
        tensors, self.position = found
        self._schedule.go_on(self.position.step, self.position.num_steps)
        self._optimiser.restore(tensors)
        for name, buffer in self._buffers().items():
            buffer.copy_(tensors[f"buffer.{name}"])
        self._forget_later_rows()
        return True

    def run(self, same: Mapping[str, Any], told: Callable[[dict[str, Any]], None]) -> None:
        """Train to the end. `told` gets each row of the records as it is written."""
        settings, position = self.settings, self.position
        self.model.train()
        while True:
            began_s = time.monotonic()
            self._schedule.settle(position.step, position.seconds)
            position.num_steps = self._schedule.num_steps
            if self._schedule.is_over(position.step):
                break
            row = self._step()
            position.step += 1
            last = self._schedule.is_over(position.step)
            if last or position.step % settings.evaluate_steps == 0:
                row["held_out"] = held_out_losses(self.model, self.windows)
            took_s = time.monotonic() - began_s
            position.seconds += took_s
            self._since_row.append((row["loss"], took_s))
            if last or "held_out" in row or position.step % settings.log_steps == 0:
                self._write_row(row, told)
            if last or position.step % settings.checkpoint_steps == 0:
                self._save(same)

    def _step(self) -> dict[str, Any]:
        """Do one step of optimisation."""
        settings, point = self.settings, self.settings.training
        length, step = settings.sequence_tokens, self.position.step
        windows = batch(self.streams, self._shares, settings.batch_sequences, length, seed=settings.seed, step=step)
        loss = total = next_token_loss(self.model, windows)
        row: dict[str, Any] = {"step": step + 1, "loss": float(loss.detach())}
        if point.chosen_balancing == "auxiliary":
            balance = auxiliary_loss(self.routers.logits, self.routers.expert_ids, self.spec.router.scoring)
            total = loss + point.auxiliary_weight * balance
            row["auxiliary_loss"] = float(balance.detach()) / self.spec.experts_per_token
        if not row["loss"] < MAX_FINITE_LOSS:
            raise ArithmeticError(f"the loss became {row['loss']} at step {step + 1}; use a lower learning rate")
        loads = self.routers.loads()
        total.backward()
        row["learning_rate"] = self._schedule.rate(step)
        row["gradient_norm"] = self._optimiser.step(row["learning_rate"])
        if point.chosen_balancing == "bias":
            move_biases(self.routers.modules, loads, point.bias_rate)
        self._loads += loads
        return row

    def _write_row(self, row: dict[str, Any], told: Callable[[dict[str, Any]], None]) -> None:
        """Append a row with the means since the last one."""
        losses, seconds = zip(*self._since_row, strict=True)
        per_step = self.settings.batch_sequences * self.settings.sequence_tokens
        entropies = self.routers.choice_entropy().tolist()
        row["loss"] = sum(losses) / len(losses)
        row["tokens"], row["seconds"] = self.tokens_seen, round(self.position.seconds, 3)
        row["tok_s"] = round(per_step * len(seconds) / sum(seconds), 1)
        row["layers"] = {
            f"{layer:02d}": {**figures, "choice_entropy": round(entropy, 4)}
            for layer, figures, entropy in zip(self.spec.moe_layers, load_figures(self._loads), entropies, strict=True)
        }
        self._loads.zero_()
        self._since_row.clear()
        with (self.folder / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        told(row)

    def _save(self, same: Mapping[str, Any]) -> None:
        buffers = {f"buffer.{name}": buffer for name, buffer in self._buffers().items()}
        save_state(self.folder, {**self._optimiser.tensors(), **buffers}, self.position, dict(same))

    def _buffers(self) -> dict[str, Tensor]:
        """Return the buffers that are part of the checkpoint, such as biases of routers."""
        stored = self.model.state_dict().keys()
        return {name: each for name, each in self.model.named_buffers() if name in stored}

    def _forget_later_rows(self) -> None:
        """Drop the rows of steps after the checkpoint, which are done again."""
        path = self.folder / METRICS_FILE
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = (line for line in lines if line.endswith(b"\n"))  # a full disk leaves half a line
        kept = [line for line in whole if json.loads(line)["step"] <= self.position.step]
        with atomic_file(path) as file:
            file.writelines(kept)


def untrained(settings: TrainingSettings) -> tuple[Any, ModelSpec]:
    """Make the model as it was before the first step."""
    return model_to_train(settings.training.recipe, settings.seed)
