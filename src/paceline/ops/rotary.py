"""Rotary positions: what a configuration says about them, the tables they become, and how a table turns a vector.

A draft receives tables and does not know which variant they come from; a serving format that names the same geometry
otherwise is translated here, both ways. It knows no attention, no cache and no model: positions come from the caller.
"""

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import ConfigError

Plain = Mapping[str, object]


# Every formula below rounds in transformers' order: the last bit of a frequency counts once for every position.
def _periods(theta: float, width: int) -> Tensor:
    """[width / 2] float32: theta ^ (2i / width), positions for each radian."""
    return theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """No scaling."""

    def frequencies(self, theta: float, *, width: int) -> Tensor:
        return 1.0 / _periods(theta, width)

    def attention_scaling(self) -> float:
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Every position divided by one factor."""

    factor: float

    def frequencies(self, theta: float, *, width: int) -> Tensor:
        return 1.0 / _periods(theta, width) / self.factor

    def attention_scaling(self) -> float:
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3:
    """Llama 3.1: long waves divided by the factor, short ones kept, a linear blend (in 1 / wavelength) between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def frequencies(self, theta: float, *, width: int) -> Tensor:
        plain = 1.0 / _periods(theta, width)
        turns = self.original_max_position_embeddings / (2 * math.pi / plain)  # within the original context
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = (1.0 - kept) * plain / self.factor + kept * plain
        return torch.where(kept < 0, plain / self.factor, torch.where(kept > 1, plain, blend))

    def attention_scaling(self) -> float:
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN (arXiv 2309.00071): slow dimensions divided by the factor, fast ones kept, a ramp between.

    attention_factor None takes the paper's 0.1 ln(factor) + 1, or DeepSeek's ratio where both mscales are given.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def frequencies(self, theta: float, *, width: int) -> Tensor:
        periods = _periods(theta, width)
        low, high = self._dimension(self.beta_fast, theta, width), self._dimension(self.beta_slow, theta, width)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        span = high - low if high != low else 0.001  # a step instead of a ramp
        kept = 1.0 - ((torch.arange(width // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
        return 1.0 / (self.factor * periods) * (1.0 - kept) + 1.0 / periods * kept

    def _dimension(self, turns: float, theta: float, width: int) -> float:
        """The dimension that makes so many turns within the original context."""
        return width * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def attention_scaling(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1.0:
            return 1.0
        grown = 0.1 * math.log(self.factor)
        if self.mscale and self.mscale_all_dim:
            return (grown * self.mscale + 1.0) / (grown * self.mscale_all_dim + 1.0)
        return grown + 1.0


Scaling = Default | Linear | Llama3 | Yarn
VARIANTS: dict[str, type[Scaling]] = {"default": Default, "linear": Linear, "llama3": Llama3, "yarn": Yarn}
# Their frequencies depend on the length reached so far, so keys cached earlier disagree with a full forward.
LENGTH_DEPENDENT = ("dynamic", "longrope")
LENGTH = "original_max_position_embeddings"
# What a configuration may say about rotary positions outside an entry, in either layout.
SETTINGS = (
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", LENGTH, "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySpec:
    """One rotary geometry.

    head_dim: C.  theta: base.  scaling: the variant.  partial: share of C that is turned (the first of it).
    sections: frequencies for each of three rows (time, height, width), M-RoPE; None for one row.
    is_interleaved: sections alternate (Qwen3-VL) instead of following each other (Qwen2-VL).
    max_positions: as configured, or None.
    """

    head_dim: int
    theta: float = 10_000.0
    scaling: Scaling = Default()
    partial: float = 1.0
    sections: tuple[int, int, int] | None = None
    is_interleaved: bool = False
    max_positions: int | None = None

    def __post_init__(self) -> None:
        if not self.theta > 1:
            raise ConfigError(f"rope_theta is {self.theta}; expected a number above 1, such as 10000")
        if not 0 < self.partial <= 1:
            raise ConfigError(f"partial_rotary_factor is {self.partial}; expected a share above 0, of at most 1")
        if self.width < 2 or self.width % 2:
            raise ConfigError(
                f"rotary width is {self.width} (head_dim {self.head_dim} x partial_rotary_factor {self.partial}); "
                "expected an even number of at least 2"
            )
        if self.sections is not None and (len(self.sections) != 3 or 2 * sum(self.sections) != self.width):
            raise ConfigError(f"mrope_section is {list(self.sections)}; expected three that sum to {self.width // 2}")

    @classmethod
    def from_settings(
        cls, settings: Plain, *, head_dim: int, max_positions: int | None = None, layer_type: str | None = None
    ) -> "RotarySpec":
        """Read the rotary keys of a transformers-style configuration, in the old or the new layout.

        settings: plain values. Old layout: `rope_theta`, `rope_scaling` and `partial_rotary_factor` side by side; new:
        all inside `rope_parameters`, perhaps once for each layer type. No theta means 10000; keys of other subjects
        are not read.  layer_type: which entry to take where there are several.
        Raises ConfigError for an unknown variant, an unknown or missing key of it, and two layouts that disagree.
        """
        return _read(settings, cls(head_dim=head_dim, max_positions=max_positions), layer_type=layer_type)

    @classmethod
    def from_config(cls, config: Plain, *, layer_type: str | None = None) -> "RotarySpec":
        """The same from a whole configuration, with `head_dim` (or what it follows from) and the context length."""
        values = dict(config)
        head_dim = config.get("head_dim") or _number(values, "hidden_size") // _number(values, "num_attention_heads")
        head_dim = int(_number({"head_dim": head_dim}, "head_dim"))
        most = (
            None if config.get("max_position_embeddings") is None else int(_number(values, "max_position_embeddings"))
        )
        return cls.from_settings(config, head_dim=head_dim, max_positions=most, layer_type=layer_type)

    @property
    def width(self) -> int:
        """How many of a head's C numbers are turned."""
        return int(self.head_dim * self.partial)

    @property
    def kind(self) -> str:
        """The variant's name in a configuration."""
        return next(name for name, variant in VARIANTS.items() if variant is type(self.scaling))

    def inverse_frequencies(self) -> Tensor:
        """[width / 2] float32, in radians for each position."""
        return self.scaling.frequencies(self.theta, width=self.width)

    def attention_scaling(self) -> float:
        """What both tables are multiplied with; not 1 only for YaRN."""
        return self.scaling.attention_scaling()

    def to_config(self) -> dict[str, object]:
        """The same geometry as configuration keys, in both layouts at once, so that any reader finds its own."""
        entry: dict[str, object] = {"rope_type": self.kind}
        entry |= {key: value for key, value in dataclasses.asdict(self.scaling).items() if value is not None}
        if self.sections is not None:
            entry["mrope_section"] = list(self.sections)
            if self.is_interleaved:
                entry["mrope_interleaved"] = True
        config: dict[str, object] = {"head_dim": self.head_dim, "rope_theta": self.theta}
        config["rope_scaling"] = dict(entry) if len(entry) > 1 else None
        config["rope_parameters"] = {**entry, "rope_theta": self.theta}
        if self.partial != 1.0:
            config["partial_rotary_factor"] = self.partial
            config["rope_parameters"] = {**entry, "rope_theta": self.theta, "partial_rotary_factor": self.partial}
        if self.max_positions is not None:
            config["max_position_embeddings"] = self.max_positions
        return config


def rotary_tables(spec: RotarySpec, *, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each angle twice (first half, second half), as the half-split rotation wants them.

    positions: [R, B, T] int64 with R = 1, or R = 3 for a spec with sections; [B, T] means R = 1.
    Returns two [B, T, spec.width] float32, on the positions' device.
    """
    rows = positions if positions.dim() == 3 else positions.unsqueeze(0)
    assert rows.shape[0] == 1 or (rows.shape[0] == 3 and spec.sections), f"{rows.shape[0]} rows, {spec}"
    frequencies = spec.inverse_frequencies().to(positions.device)
    if rows.shape[0] == 1 or spec.sections is None:
        angles = rows[0].unsqueeze(-1).float() * frequencies  # [B, T, width / 2]
    else:
        row_of = section_rows(spec.sections, is_interleaved=spec.is_interleaved)
        angles = rows[row_of].movedim(0, -1).float() * frequencies  # [B, T, width / 2]
    angles = torch.cat([angles, angles], dim=-1)
    scaling = spec.attention_scaling()
    return angles.cos() * scaling, angles.sin() * scaling


def section_rows(sections: tuple[int, int, int], *, is_interleaved: bool) -> list[int]:
    """Which row of positions (0 time, 1 height, 2 width) each frequency follows.

    Following each other: all of time, then height, then width. Interleaved: time, height, width, time, ... for as long
    as height and width have any left; time takes the rest.
    """
    if not is_interleaved:
        return [row for row, count in enumerate(sections) for _ in range(count)]
    return [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(sum(sections))]


def apply_rotary(x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys; numbers beyond the tables' width pass through (partial rotary).

    x: [B, A, T, C] float.  cos, sin: [B, T, width], width <= C.  Returns [B, A, T, C] in x's dtype.
    """
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    low, high = turned.chunk(2, dim=-1)
    quarter = torch.cat([-high, low], dim=-1)
    turned = turned * cos.unsqueeze(1).to(x.dtype) + quarter * sin.unsqueeze(1).to(x.dtype)
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def _read(settings: Plain, base: RotarySpec, *, layer_type: str | None) -> RotarySpec:
    new = _entry(settings, "rope_parameters", layer_type=layer_type)
    old = _entry(settings, "rope_scaling", layer_type=layer_type)
    spec = _spec(settings, new or old, base)
    theta = settings.get("rope_theta")
    if new and ((old and _spec(settings, old, base) != spec) or (theta is not None and theta != spec.theta)):
        raise ConfigError(
            "rope_parameters and rope_theta / rope_scaling describe two geometries; expected one: remove the wrong one"
        )
    return spec


def _entry(config: Plain, key: str, *, layer_type: str | None) -> dict[str, object]:
    """One flat rotary entry of a configuration, empty if it has none."""
    entry = config.get(key)
    if entry is None:
        return {}
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{key} is {entry!r}; expected a table")
    found: dict[str, object] = {str(name): value for name, value in entry.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if not any(isinstance(value, Mapping) for value in found.values()):
        return found
    if layer_type not in found:
        raise ConfigError(
            f"{key} has one entry per layer type: {sorted(found)}; expected one of them, found {layer_type}"
        )
    return _entry(found, layer_type, layer_type=None)


def _spec(settings: Plain, entry: dict[str, object], base: RotarySpec) -> RotarySpec:
    values = {key: value for key, value in entry.items() if value is not None}
    named = values.pop("type", "default")
    named = values.pop("rope_type", named)
    kind = "default" if named == "mrope" else str(named)
    if kind not in VARIANTS:
        why = " (its frequencies change with the length, so cached keys go stale)" if kind in LENGTH_DEPENDENT else ""
        raise ConfigError(f"rope_type is {kind!r}{why}; expected one of {', '.join(VARIANTS)}")
    return dataclasses.replace(
        base,
        theta=_number(values, "rope_theta", default=_given(settings, "rope_theta", 10_000.0)),
        partial=_number(values, "partial_rotary_factor", default=_given(settings, "partial_rotary_factor", 1.0)),
        sections=_sections(values.pop("mrope_section", None)),
        is_interleaved=bool(values.pop("mrope_interleaved", False)),
        scaling=_scaling(kind, values, outer_length=settings.get(LENGTH), max_positions=base.max_positions),
    )


def _scaling(kind: str, values: dict[str, object], *, outer_length: object, max_positions: int | None) -> Scaling:
    variant = VARIANTS[kind]
    fields = {field.name: field for field in dataclasses.fields(variant)}
    if LENGTH in fields:
        # The order of transformers: beside the entry, inside it, else the whole context.
        inside = max_positions if values.get(LENGTH) is None else values[LENGTH]
        length = _number({LENGTH: inside if outer_length is None else outer_length}, LENGTH)
        values[LENGTH] = length
        if kind == "yarn" and max_positions is not None:
            values.setdefault("factor", max_positions / length)
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ConfigError(f"rope_type {kind!r} has no {', '.join(unknown)}; it takes {', '.join(fields) or 'no keys'}")
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in values]
    if missing:
        raise ConfigError(f"rope_type {kind!r} lacks {', '.join(missing)}; add it to the rotary entry")
    given: dict[str, float | bool] = {
        name: bool(value) if name == "truncate" else _number({name: value}, name) for name, value in values.items()
    }
    if LENGTH in given:
        given[LENGTH] = int(given[LENGTH])
    return variant(**given)  # pyright: ignore[reportArgumentType]


def _given(settings: Plain, key: str, default: float) -> object:
    """What the settings say, 0 included; None is what a configuration writes for "not set"."""
    value = settings.get(key)
    return default if value is None else value


def _number(values: dict[str, object], key: str, *, default: object = None) -> float:
    value = values.pop(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ConfigError(f"{key} is {value!r}; expected a number above 0")
    return float(value)


def _sections(value: object) -> tuple[int, int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 3:  # pyright: ignore[reportUnknownArgumentType]
        raise ConfigError(f"mrope_section is {value!r}; expected three whole numbers")
    time, height, width = (int(_number({"mrope_section": part}, "mrope_section")) for part in value)  # pyright: ignore[reportUnknownVariableType]
    return time, height, width
