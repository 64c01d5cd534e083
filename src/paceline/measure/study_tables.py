"""A study's record as tables and as a Markdown document; it computes no figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.measure.table import PLUS_MINUS, Record, Table, escaped, escaped_table, markdown, pm

ERRORS = (
    "Figures are ratios of sums over prompts and seeds. Errors are standard errors: over prompts by bootstrap, a "
    "prompt drawn with all its seeds and, in a difference, with both drafts; over seeds from the seeds' own figures; "
    "the two added as squares. All arms of a seed are decoded in one run, prompt by prompt in turns."
)


def study_tables(record: Record) -> list[Table]:
    """What training cost, what was reached with each plan and temperature, and the gains on each file."""
    measured = record["measured"]
    settings = dict.fromkeys((each["temperature"], each["plan"]) for each in measured)
    tables = [_costs(record)]
    for temperature, plan in settings:
        rows = [each for each in measured if (each["temperature"], each["plan"]) == (temperature, plan)]
        tables += [_reached(record, rows, f"{plan}, temperature {temperature:g}")]
    tables += [_by_file(record, temperature, plan) for temperature, plan in settings]
    return [table for table in tables if table.rows]


def pair_tables(record: Record) -> list[Table]:
    """The gains of one comparison, over all prompts and on each file."""
    arms = record["arms"]
    rows = [("all prompts", *_gain_cells(record, record["baseline"], record[arms["compared"]]))]
    for file, gains in record["per_file"].items():
        ours, theirs = record[arms["compared"]]["per_file"][file], record["baseline"]["per_file"][file]
        rows.append((file, *_gain_cells(gains, theirs, ours)))
    title = (
        f"{arms['compared']} against {arms['baseline']}: {record['plan']}, temperature {record['temperature']:g}, "
        f"{record['num_prompts']} prompts, {len(record['seeds'])} seeds"
    )
    heads = ("prompts", "L, baseline", "L", "gain of L, %", "S_wall, baseline", "S_wall", "gain of S_wall, %")
    return [Table(title, heads, tuple(rows))]


def study_markdown(record: Record) -> str:
    """The document study.md."""
    study = record["study"]
    seeds = ", ".join(str(seed) for seed in record["seeds"])
    head = [
        f"# Study {escaped(record['name'])}",
        f"Baseline: {escaped(record['baseline'])}. Seeds: {seeds}. Weights measured: {escaped(study['weights'])}.",
        ERRORS,
    ]
    return "\n\n".join([*head, *(markdown(escaped_table(table)) for table in study_tables(record))]) + "\n"


def _costs(record: Record) -> Table:
    heads = (
        "arm", "same as baseline", "seeds", "steps", "tokens", "supervised", "training, s", "simulated L at the end",
        "simulated L, best",
    )  # fmt: skip
    rows = [
        (
            arm, str(costs["equal"]), str(costs["num_seeds"]), pm(costs, "steps", digits=0),
            pm(costs, "tokens", digits=0), pm(costs, "supervised", digits=0), pm(costs, "seconds", digits=1),
            pm(costs, "accepted_length", digits=3), pm(costs, "best", digits=3),
        )
        for arm, costs in record["arms"].items()
        if costs["steps"] is not None
    ]  # fmt: skip
    return Table(f"What training cost, mean {PLUS_MINUS} standard error over seeds", heads, tuple(rows))


def _reached(record: Record, measured: list[Mapping[str, Any]], title: str) -> Table:
    heads = ("arm", "prompts", "L", "gain of L, %", "S_wall", "gain of S_wall, %", "tokens/s", "identical")
    rows = [
        (
            each["arm"] + (" (baseline)" if each["arm"] == record["baseline"] else ""), str(each["num_prompts"]),
            pm(each, "accepted_length", digits=3), pm(each, "length_gain_pct"), pm(each, "s_wall", digits=3),
            pm(each, "s_wall_gain_pct"), pm(each, "tokens_per_s", digits=1),
            "-" if each["identical"] is None else "yes" if each["identical"] else "NO",
        )
        for each in measured
    ]  # fmt: skip
    return Table(title, heads, tuple(rows))


def _by_file(record: Record, temperature: float, plan: str) -> Table:
    heads = ("arm: file", "n", "L", "gain of L, %", "S_wall", "gain of S_wall, %")
    rows = [
        (
            f"{each['arm']}: {file}", str(one["n"]), pm(one, "accepted_length", digits=3), pm(one, "length_gain_pct"),
            pm(one, "s_wall", digits=3), pm(one, "s_wall_gain_pct"),
        )
        for each in record["measured"]
        if (each["temperature"], each["plan"]) == (temperature, plan)
        for file, one in each["per_file"].items()
    ]  # fmt: skip
    return Table(f"By file: {plan}, temperature {temperature:g}", heads, tuple(rows))


def _gain_cells(gains: Record, theirs: Record, ours: Record) -> tuple[str, ...]:
    return (
        pm(theirs, "accepted_length", digits=3), pm(ours, "accepted_length", digits=3), pm(gains, "length_gain_pct"),
        pm(theirs, "s_wall", digits=3), pm(ours, "s_wall", digits=3), pm(gains, "s_wall_gain_pct"),
    )  # fmt: skip
