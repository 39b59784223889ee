"""Define the numbers of a hardware profile, which say where they come from. Torch-free."""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import PlainValidator
from pydantic_core import PydanticCustomError

from harness.config import ConfigError, require

# peak: a data sheet's, or the arithmetic of clocks and widths. achieved: measured, or estimated from measurements of
# like hardware (the source then starts with "estimate"). nominal: sizes and counts. chosen: a plain number.
Kind = Literal["peak", "achieved", "nominal", "chosen"]
GEMM_DTYPES = ("float32", "float16", "bfloat16", "float8")


class Constant(float):
    """A float that knows its kind and its source; `chosen` and no source for a plain number."""

    kind: Kind
    source: str

    def __new__(cls, value: float, kind: Kind = "chosen", source: str = "") -> Self:
        constant = super().__new__(cls, value)
        constant.kind, constant.source = kind, source
        return constant


def _parsed(given: Any) -> Constant:
    if not isinstance(given, dict):
        return Constant(_positive(given))
    missing = {"value", "kind", "source"} - given.keys()
    require(not missing, min(missing, default=""), "missing; a constant is a number or has value, kind and source")
    unknown = given.keys() - {"value", "kind", "source"}
    require(not unknown, min(unknown, default=""), "unknown key; valid keys are value, kind and source")
    kinds, kind, source = get_args(Kind), given["kind"], given["source"]
    require(kind in kinds, "kind", f"must be one of {', '.join(kinds)}, got {kind!r}")
    require(isinstance(source, str) and source != "", "source", f"must say where the value comes from, got {source!r}")
    try:
        return Constant(_positive(given["value"]), kind, source)
    except PydanticCustomError as error:
        raise ConfigError("value", f"must be {error.message()}, got {given['value']!r}") from None


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticCustomError("constant", "a valid number, or value, kind and source")
    if not isfinite(value):
        raise PydanticCustomError("constant", "a finite number")
    if value <= 0:
        raise PydanticCustomError("constant", "> 0")
    return float(value)


def _parsed_or_none(given: Any) -> Constant | None:
    return None if given is None else _parsed(given)


def _parsed_by_dtype(given: Any) -> dict[str, Constant]:
    if not isinstance(given, dict):
        raise PydanticCustomError("constants", "a mapping from dtype to constant")
    parsed = {}
    for dtype, value in given.items():
        require(dtype in GEMM_DTYPES, dtype, f"unknown dtype; valid ones are {', '.join(GEMM_DTYPES)}")
        if value is None:
            continue
        try:
            parsed[dtype] = _parsed(value)
        except ConfigError as error:
            raise error.below(dtype) from None
        except PydanticCustomError as error:
            raise ConfigError(dtype, f"must be {error.message()}, got {value!r}") from None
    return parsed


Number = Annotated[Constant, PlainValidator(_parsed)]
OptionalNumber = Annotated[Constant | None, PlainValidator(_parsed_or_none)]
NumberByDtype = Annotated[dict[str, Constant], PlainValidator(_parsed_by_dtype)]
