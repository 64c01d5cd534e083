"""A run's state as named tensors and plain values, and back: weights, moments, random states, counters.

It knows no file: `store.training_state` writes what this module collects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from paceline.config import Recipe, default_of
from paceline.errors import ConfigError
from paceline.store.training_state import TrainingState
from paceline.store.weights import fill_module
from paceline.training.objectives._base import Remembering
from paceline.training.optimizers import RESERVED, Optimizers
from paceline.training.prepare import Examples

# What a resumed run may change: it decides when things are written, not what is trained.
FREE = ("save_every", "log_every", "save_dtype", "trackers", "threads")


@dataclass(slots=True)
class Counters:
    """What a run counts.

    supervised: tokens trained on.  best, best_step: highest simulated accepted length, and where.  last: the latest.
    seconds: since the run began, pauses between a kill and a resume left out.  meter: sums since the last log line.
    """

    step: int = 0
    supervised: int = 0
    best: float | None = None
    best_step: int | None = None
    last: float | None = None
    seconds: float = 0.0
    meter: dict[str, Any] = field(default_factory=dict)


def identity_of(recipe: Recipe, *, examples: Examples, target: str, world: int) -> dict[str, Any]:
    """What must be equal for a run to be resumed.  target: fingerprint of its weights."""
    sections = recipe.model_dump(mode="json")
    kept = {
        **{f"draft.{key}": value for key, value in sections["draft"].items()},
        **{f"objective.{key}": value for key, value in sections["objective"].items()},
        **{f"training.{key}": value for key, value in sections["training"].items() if key not in FREE},
        **{f"validation.{key}": value for key, value in sections["validation"].items()},
        "data.supervise": recipe.data.supervise,
        "target.dtype": recipe.target.dtype,
        "target.fingerprint": target,
        "the number of processes": world,
    }
    rows = "\n".join(example.digest for example in (*examples.train, *examples.validation))
    return {**kept, "the rows": hashlib.sha256(rows.encode()).hexdigest()}


def check_identity(found: Mapping[str, Any], *, expected: Mapping[str, Any], where: str, best: str) -> None:
    """Raises ConfigError naming what differs between the run that is resumed and this one.

    where: the run's folder.  best: its best draft, from which another run may start.
    A key that a run of an older version did not write is what the recipe's default says: that is what it did.
    """
    found = {**{key: default_of(key) for key in expected}, **found}
    differing = [key for key in expected if found.get(key) != expected[key]]
    if differing:
        key = differing[0]
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise ConfigError(
            f"{where} was trained with another {key}: {_short(found.get(key))}, now {_short(expected[key])}{more}; "
            f"resume with the same, or go on with other settings in another --out with --init-from {best}"
        )


def take_state(
    draft: nn.Module,
    optimizers: Optimizers,
    objective: object,
    *,
    counters: Counters,
    identity: Mapping[str, Any],
    accelerator: Accelerator,
) -> TrainingState:
    """The state after `counters.step` steps; every process must call it."""
    tensors = {f"draft.{name}": tensor.detach() for name, tensor in draft.state_dict().items()}
    tensors |= dict(optimizers.state())
    tensors |= _by_process("rng", _random_states(accelerator), accelerator=accelerator)
    if isinstance(objective, Remembering):
        tensors |= _by_process("objective", {"own": objective.state()}, accelerator=accelerator)
    return TrainingState(counters.step, tensors, {"counters": asdict(counters), "identity": dict(identity)})


def put_state(
    state: TrainingState,
    draft: nn.Module,
    optimizers: Optimizers,
    objective: object,
    *,
    accelerator: Accelerator,
    where: str,
) -> Counters:
    """Put a state back into a draft, an optimiser, an objective and the process's random state.

    Raises CheckpointError.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.tensors.items():
        kind, _, rest = name.partition(".")
        groups.setdefault(kind, {})[rest] = tensor
    fill_module(draft, groups["draft"], where=where)
    optimizers.load({kind: values for kind, values in groups.items() if kind not in RESERVED})
    rank = accelerator.process_index
    torch.set_rng_state(groups["rng"][f"cpu.{rank}"])
    if accelerator.device.type == "cuda":
        torch.cuda.set_rng_state(groups["rng"][f"cuda.{rank}"], accelerator.device)
    if isinstance(objective, Remembering):
        objective.load(groups["objective"][f"own.{rank}"])
    return Counters(**state.values["counters"])


def _random_states(accelerator: Accelerator) -> dict[str, Tensor]:
    """torch's global random states of this process; our own code draws from generators only, plug-ins may not."""
    own = {"cpu": torch.get_rng_state()}
    if accelerator.device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(accelerator.device)
    return own


def _by_process(group: str, own: dict[str, Tensor], *, accelerator: Accelerator) -> dict[str, Tensor]:
    """Every process's tensors, which have the same shapes, as "group.name.rank"; every process must call it."""
    found: dict[str, Tensor] = {}
    for name, tensor in own.items():
        gathered = accelerator.gather(tensor[None].to(accelerator.device))
        assert isinstance(gathered, Tensor)
        found |= {f"{group}.{name}.{rank}": row.cpu() for rank, row in enumerate(gathered)}
    return found


def _short(value: Any) -> str:
    text = str(value)
    return f"{text[:12]}.." if len(text) > 40 else text
