"""`paceline verify-cost`: what a target call costs by its number of nodes, natively and with torch eager.

It reads options and prints; `measure.verify_cost` measures.
"""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli._base import Command

NODES = "1,2,3,4,5,6,7,8,10,12,16,20,24,28,32,40,48,56,64"


def verify_cost(
    target: Annotated[str, typer.Option("--target", "-t", help="Target: a name, a folder or a Hub id.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The record, JSON.")],
    nodes: Annotated[str, typer.Option(help="Sizes of the proposals, comma-separated.")] = NODES,
    context: Annotated[int, typer.Option(min=1, help="Committed tokens in front of them.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Calls of each engine and size.")] = 15,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's choice by default.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a record that is there.")] = False,
) -> None:
    """Measure what verifying costs: seconds of a target call by the number of nodes, native and eager in turns.

    Beside them stands what the machine allows: memory bandwidth and float32 arithmetic, measured in the same run.
    float32 on the CPU only. A busy machine makes every figure worse; compare medians with the lowest.
    """
    import json

    import torch
    from rich.console import Console

    from paceline.cli._busy import busy_warning
    from paceline.cli._outputs import check_record_path
    from paceline.cli._tables import drawn
    from paceline.errors import ConfigError
    from paceline.machine import set_threads
    from paceline.measure.report import verify_cost_tables
    from paceline.measure.verify_cost import check_sizes, cost_record, measure_costs, measure_machine
    from paceline.store.files import write_text
    from paceline.store.hub import load_model
    from paceline.store.manifest import close_manifest, open_manifest
    from paceline.targets.generic import Target

    sizes = [int(part) for part in nodes.split(",") if part.strip().isdecimal() and len(part) < 10 and int(part) > 0]
    if len(sizes) != len(nodes.split(",")):
        raise ConfigError(f"--nodes: found '{nodes}', expected numbers above 0 with commas, such as 1,8,16")
    check_record_path(out, may_replace=force)
    set_threads(threads, option="--threads")
    console = Console(highlight=False, soft_wrap=True)
    model = load_model(target)
    auto, eager = Target(model, name=target), Target(model, name=target, compile="off")
    check_sizes(auto, nodes=sizes, context=context)
    manifest = open_manifest(
        dtype="float32", notes={"target": target, "engine": auto.engine, "context": context, "rounds": rounds}
    )
    machine = measure_machine()
    with busy_warning(console, threads=torch.get_num_threads()):
        costs = measure_costs(auto, eager, machine=machine, nodes=sizes, context=context, rounds=rounds)
    record = cost_record(costs, machine=machine, manifest=close_manifest(manifest).as_dict())
    write_text(out, json.dumps(record, indent=1) + "\n")
    for table in verify_cost_tables(record):
        console.print(drawn(table))
    console.print(f"Written: {out}")


PLUGIN = Command(run=verify_cost, group="Measure", order=40)
