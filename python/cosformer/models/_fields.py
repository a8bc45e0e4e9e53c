"""What a config key may hold, and what is said about a value that it may not."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from cosformer.models._nearest_key import nearest_key

#: The newest config.json that this version writes and reads.
FORMAT_VERSION = 1

# Sizes above these are mistakes or attacks, as in the C++ library.
MAX_DIM = 1 << 20
MAX_COUNT = 1 << 31
MAX_LAYERS = 1 << 14
MAX_SEED = 1 << 62
HUGE = 1e30


@dataclass(frozen=True)
class IntRange:
    """Integers from low to high, ends included."""

    low: int
    high: int

    def check(self, key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(key, value, "an integer")
        if not -(1 << 63) <= value < 1 << 63:
            raise wrong_type(key, value, "an integer of 64 bits")
        if self.low <= value <= self.high:
            return value
        if key == "format_version" and value > self.high:
            raise NotImplementedError(
                f"format_version: found {value}, this version reads up to {self.high}: "
                f"the model was written by a newer cosformer"
            )
        upper = "" if self.low == self.high else f" to {self.high}"
        raise ValueError(f"{key}: found {value}, expected {self.low}{upper}")


@dataclass(frozen=True)
class RealRange:
    """Numbers from low (open_low: above it) to high."""

    low: float
    high: float
    open_low: bool = False

    def check(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong_type(key, value, "a number")
        # Written so that NaN fails.
        above = value > self.low if self.open_low else value >= self.low
        if above and value <= self.high:
            return float(value)
        side = "above" if self.open_low else "from"
        raise ValueError(
            f"{key}: found {value:g}, expected a number {side} {self.low:g} up to {self.high:g}"
        )


@dataclass(frozen=True)
class Choices:
    """One of these words."""

    values: tuple[str, ...]

    def check(self, key: str, value: Any) -> str:
        if not isinstance(value, str):
            raise wrong_type(key, value, "a string")
        if value in self.values:
            return value
        listed = ", ".join(f"'{each}'" for each in self.values)
        near = nearest_key(value, self.values)
        hint = f"; did you mean '{near}'?" if near else ""
        raise ValueError(f"{key}: found {quoted(value)}, expected one of {listed}{hint}")


@dataclass(frozen=True)
class Flag:
    """true or false."""

    def check(self, key: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise wrong_type(key, value, "true or false")
        return value


def key_field(default: Any, rule: IntRange | RealRange | Choices | Flag) -> Any:
    """A dataclass field whose values keep the rule."""
    return dataclasses.field(default=default, metadata={"rule": rule})


def integer(default: int, low: int, high: int) -> Any:
    return key_field(default, IntRange(low, high))


def real(default: float, low: float, high: float, *, open_low: bool = False) -> Any:
    return key_field(default, RealRange(low, high, open_low))


def choice(default: str, *values: str) -> Any:
    return key_field(default, Choices(values))


def flag(default: bool) -> Any:
    return key_field(default, Flag())


def ruled_fields(config: Any) -> list[dataclasses.Field]:
    """The fields of a config (or its class) that have a rule, in the order of config.json."""
    return [each for each in dataclasses.fields(config) if "rule" in each.metadata]


def check_fields(config: Any, prefix: str) -> None:
    """Each value by itself against its rule; numbers become floats where reals are expected."""
    for each in ruled_fields(config):
        value = each.metadata["rule"].check(prefix + each.name, getattr(config, each.name))
        object.__setattr__(config, each.name, value)


def quoted(text: str) -> str:
    """In quotes for a message: control characters escaped, cut where it is long."""
    longest = 80
    shown = "".join(
        character if character.isprintable() else repr(character)[1:-1]
        for character in text[:longest]
    )
    return f"'{shown}'" if len(text) <= longest else f"'{shown}...' ({len(text)} characters)"


def describe(value: Any) -> str:
    """A value of a JSON document, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the string {quoted(value)}"
    if isinstance(value, (int, float)):
        return f"the number {json.dumps(value)}"
    if isinstance(value, (list, tuple)):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    return f"a {type(value).__name__}"


def wrong_type(key: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{key}: found {describe(value)}, expected {expected}")


def check_keys(found: dict[str, Any], prefix: str, known: list[str]) -> None:
    """An unknown key is an error that names the nearest known one."""
    for key in sorted(found):
        if key not in known:
            near = nearest_key(key, known)
            hint = f"; did you mean '{prefix}{near}'?" if near else ""
            raise ValueError(f"unknown key {quoted(prefix + key)}{hint}")
