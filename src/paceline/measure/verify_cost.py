"""What a target call costs by its number of nodes, natively and with torch eager, against what the machine could do.

The two engines take turns on one cache, so that the machine's moods hit both.  It knows no draft and no prompts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.decoding.plan import MOST_NODES
from paceline.errors import ConfigError
from paceline.records import Scores
from paceline.store.figures import rounded
from paceline.targets.generic import Target

KIND, FORMAT = "verify-cost", 1
READ_FLOATS = 1 << 27  # half a GB: more than any cache holds
READ_WIDTH = 1 << 10
PRODUCT = (1024, 4096, 4096)  # rows, inputs, outputs
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Machine:
    """Best of some tries with torch's threads: reading memory, GB/s, and float32 products, GFLOP/s."""

    read_gb_per_s: float
    gflop_per_s: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Calls of `nodes` nodes by one engine.

    median, lowest: seconds.  limit: seconds that the machine needs at least, for reading the weights or for the
    arithmetic, whichever is longer.  times_limit: median / limit.  times_one: median / median of one node.
    """

    engine: str
    nodes: int
    calls: int
    median: float
    lowest: float
    limit: float
    times_limit: float
    times_one: float


def measure_machine() -> Machine:
    """Measure memory and arithmetic; about two seconds and half a GB."""
    floats = torch.ones(READ_FLOATS)
    rows, inputs, outputs = PRODUCT
    left, right = torch.ones(rows, inputs), torch.ones(outputs, inputs)
    # Two readers: which one is nearer the memory's limit differs between machines, and a sum alone was 28 % slower than
    # what a forward reads on one of them.
    matrix, vector = floats.view(-1, READ_WIDTH), torch.ones(READ_WIDTH)
    read = min(_seconds(reader) for reader in (floats.sum, lambda: matrix @ vector) for _ in range(REPEATS))
    product = min(_seconds(lambda: nn.functional.linear(left, right)) for _ in range(REPEATS))
    return Machine(4e-9 * READ_FLOATS / read, 2e-9 * rows * inputs * outputs / product)


def check_sizes(target: Target, *, nodes: Sequence[int], context: int) -> None:
    """Raises ConfigError for sizes that no proposal has, or that the target has no positions for."""
    most, limit = max(nodes), target.max_positions
    if most > MOST_NODES:
        raise ConfigError(f"--nodes: found {most}, expected at most {MOST_NODES}, the most that a plan may have")
    if limit is not None and context + most > limit:
        raise ConfigError(
            f"--context: found {context} and {most} nodes behind it, expected at most {limit} together: "
            "the target has no more positions"
        )


def measure_costs(
    target: Target,
    eager: Target,
    *,
    machine: Machine,
    nodes: Sequence[int],
    context: int,
    rounds: int,
    watch: Callable[[int], None] = lambda count: None,
) -> list[Cost]:
    """Time binary trees of each size behind `context` committed tokens.

    target, eager: one model, with compile="auto" and "off".  rounds: calls of each engine and size, after two that do
    not count.  watch: told each size before it is measured.
    """
    engines = {target.engine: target, "eager": eager}
    cache = target.new_cache(1, capacity=context + max(nodes))
    generator = torch.Generator().manual_seed(0)
    target.prefill(cache, [torch.randint(0, target.vocab_size, (context,), generator=generator)])
    seconds: dict[tuple[str, int], list[float]] = {}
    for count in nodes:
        watch(count)
        tokens = torch.randint(0, target.vocab_size, (1, count), generator=generator)
        mask, depths = _binary_tree(count)
        for turn in range(rounds + 2):
            for name in list(engines) if turn % 2 else reversed(list(engines)):
                spent = _seconds(partial(engines[name].score, cache, tokens, mask=mask[None], depths=depths[None]))
                if turn >= 2:
                    seconds.setdefault((name, count), []).append(spent)
    limits = {count: _limit(target, count, machine=machine) for count in nodes}
    return [_cost(name, count, seconds, limits) for name, count in seconds]


def cost_record(costs: Sequence[Cost], *, machine: Machine, manifest: dict[str, Any]) -> dict[str, Any]:
    """Plain values, ready for JSON, figures rounded."""
    return {
        "kind": KIND,
        "format": FORMAT,
        "machine": rounded(asdict(machine)),
        "costs": [rounded(asdict(cost)) for cost in costs],
        "manifest": manifest,
    }


def _cost(name: str, count: int, seconds: dict[tuple[str, int], list[float]], limits: dict[int, float]) -> Cost:
    taken = seconds[name, count]
    median = statistics.median(taken)
    first = min(nodes for engine, nodes in seconds if engine == name)
    return Cost(
        engine=name, nodes=count, calls=len(taken), median=median, lowest=min(taken), limit=limits[count],
        times_limit=median / limits[count], times_one=median / statistics.median(seconds[name, first]),
    )  # fmt: skip


def _limit(target: Target, count: int, *, machine: Machine) -> float:
    """Every weight of a product is read once and used by every node; the keys and values are small beside them."""
    weights = sum(module.weight.numel() for module in target.model.modules() if isinstance(module, nn.Linear))
    return max(4e-9 * weights / machine.read_gb_per_s, 2e-9 * weights * count / machine.gflop_per_s)


def _binary_tree(count: int) -> tuple[Tensor, Tensor]:
    """Mask [N, N] and depths [N] of a tree in which node i hangs on node (i - 1) // 2."""
    mask = torch.eye(count, dtype=torch.bool)
    depths = torch.zeros(count, dtype=torch.int64)
    for node in range(1, count):
        mask[node] |= mask[(node - 1) // 2]
        depths[node] = depths[(node - 1) // 2] + 1
    return mask, depths


def _seconds(call: Callable[[], Tensor | Scores]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
