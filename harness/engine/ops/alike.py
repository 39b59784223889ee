"""Work out once for a micro-batch what ops of one class have to do, layer after layer the same. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Protocol, TypeVar

from harness.engine.batch import MicroBatch
from harness.machine.base import Work
from harness.model.spec import ModelSpec


class _OnBatch(Protocol):
    """An op on a micro-batch, in one GPU's share of the model."""

    spec: ModelSpec
    batch: MicroBatch


AnyOp = TypeVar("AnyOp", bound=_OnBatch)
Method = Callable[[AnyOp], Work]


def _all_alike(op: Any) -> None:
    """Tell no op of a class from another one."""


def once_a_batch(told_apart_by: Callable[[Any], Hashable] = _all_alike) -> Callable[[Method[AnyOp]], Method[AnyOp]]:
    """Make one op's `work` serve all ops of its class on the same micro-batch that `told_apart_by` does not tell apart.

    What this returns never changes for an op; whatever else decides the work is the batch's, or the model's and the
    same in all layers.
    """

    def decorate(work: Method[AnyOp]) -> Method[AnyOp]:
        @wraps(work)
        def shared(op: AnyOp) -> Work:
            key = op.__dict__.get("_alike")
            if key is None:  # an op keeps it, since it may be submitted again for another batch
                key = op.__dict__["_alike"] = _key(op, told_apart_by)
            works = op.batch.works
            found = works.get(key)
            if found is None:
                found = works[key] = (work(op), op.spec)  # as long as it is kept, no other one has its id
            return found[0]

        shared.told_apart_by = told_apart_by  # type: ignore[attr-defined]
        return shared

    return decorate


def alike(op: Any) -> Hashable | None:
    """Return what ops on one micro-batch have in common whose `work` is the same; None where only the op can tell."""
    told_apart_by = getattr(type(op).work, "told_apart_by", None)
    return None if told_apart_by is None else _key(op, told_apart_by)


def _key(op: Any, told_apart_by: Callable[[Any], Hashable]) -> Hashable:
    return type(op), id(op.spec), told_apart_by(op)
