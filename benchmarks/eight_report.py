"""The report of eight_gpus.py: what was measured, beside what was predicted, as Markdown."""

from __future__ import annotations

from typing import Any


def report_lines(found: dict[str, Any]) -> list[str]:
    about = found["environment"]
    lines = [
        "# The big run",
        "",
        f"{about['devices']} x {about['device']}, torch {about['torch']}, commit {about['commit']}; target: "
        f"{about['target']} (random weights); averaging every {about['every_rows']} rows of a drafter.",
        f"`{about['command']}`",
        "",
    ]
    if found.get("single"):
        lines += _single(found["single"])
    if found["runs"]:
        lines += _runs(found["runs"])
        lines += _workers(found["runs"])
    if found.get("together"):
        lines += _together(found["together"])
    if found.get("stop"):
        lines += _stop(found["stop"])
    return lines


def _single(single: dict[str, Any]) -> list[str]:
    lines = ["## One worker alone", "", "| stage | ktok/s | s a row | scatter | GiB |", "|---|---|---|---|---|"]
    for side in ("target", "drafter"):
        rate = single[side]
        peak = max((m["allocated_gib"] for m in single[f"{side}_memory"].values()), default=0.0)
        lines.append(
            f"| {side} | {rate['tokens_per_s'] / 1e3:.2f} | {rate['row_s']:.3f} | {rate['jitter']:.1%} | {peak:.1f} |"
        )
    return [
        *lines,
        "",
        f"Rows are captured {single['capture_layout']}; self-test {single['self_test_s']:.1f} s, target made in "
        f"{single['target_built_s']:.1f} s, drafter warmed (compiled) in {single['drafter_warmed_s']:.1f} s.",
        "",
    ]


def _runs(runs: list[dict[str, Any]]) -> list[str]:
    head = (
        "| T:D | scheme | ktok/s | predicted | share | supervised ktok/s | block ktok/s | drafters wait | targets wait "
        "| queue rows | GB/s of states | averaging s |"
    )
    lines = ["## Runs", "", head, "|" + "---|" * 12]
    for run in runs:
        averaging = ", ".join(f"{s:.2f}" for s in run["averaging_s"]) or "none"
        lines.append(
            f"| {run['targets']}:{run['drafters']} | {_scheme(run)} | {run['tokens_per_s'] / 1e3:.2f} "
            f"| {run['predicted']['tokens_per_s'] / 1e3:.2f} | {run['measured_to_predicted']:.3f} "
            f"| {run['supervised_tokens_per_s'] / 1e3:.2f} | {run['block_tokens_per_s'] / 1e3:.1f} "
            f"| {run['drafter_waiting']:.1%} | {run['target_waiting']:.1%} | {run['queue_rows_mean'] or 0:.1f} "
            f"| {run['state_bytes_per_s'] / 1e9:.2f} | {averaging} |"
        )
    return [*lines, ""]


def _scheme(run: dict[str, Any]) -> str:
    return run["scheme"] + (", one-way copy" if run["sync"] == "copy" else "")


def _workers(runs: list[dict[str, Any]]) -> list[str]:
    lines = ["## Workers", "", "| run | worker | rows | working | waiting | averaging |", "|---|---|---|---|---|---|"]
    for run in runs:
        name = f"{run['targets']}:{run['drafters']} {_scheme(run)}"
        for worker, share in run["workers"].items():
            lines.append(
                f"| {name} | {worker} | {share['rows']} | {share['working']:.1%} | {share['waiting']:.1%} "
                f"| {share['averaging']:.1%} |"
            )
    last = runs[-1]
    peaks = ", ".join(f"{device} {m['allocated_gib']:.1f}" for device, m in last["memory"].items())
    return [
        *lines,
        "",
        f"Rows move by {last['rows_move_by']}. Start of the last run: targets {last['targets_built_s']:.1f} s, "
        f"coordinator {last['coordinator_built_s']:.1f} s, of it compiling {last['compiling_s']:.1f} s."
        + (f" Peak GiB: {peaks}." if peaks else ""),
        *(_gpus(run) for run in runs if run["gpus"]),
        "",
    ]


def _gpus(run: dict[str, Any]) -> str:
    """What nvidia-smi said while the run was counted."""
    each = ", ".join(
        f"{index}: {m['utilization.gpu']:.0f} %, {m['power.draw']:.0f} W, {m['clocks.sm']:.0f} MHz"
        for index, m in run["gpus"].items()
    )
    return f"GPUs in {run['targets']}:{run['drafters']} {_scheme(run)} (busy, power, clock): {each}."


def _together(together: dict[str, Any]) -> list[str]:
    rates = ", ".join(f"{name} {ratio:.3f}" for name, ratio in sorted(together["rate_to_alone"].items()))
    return [
        "## All workers at once, without the pipeline",
        "",
        f"Rate over that of one worker alone: {rates}; mean {together['mean']:.3f}.",
        "",
    ]


def _stop(stop: dict[str, Any]) -> list[str]:
    return [
        "## Stop and resume",
        "",
        f"Coordinated stop {stop['stop_s']:.1f} s, of it checkpoint {stop['checkpoint_s']:.1f} s; resumed and ready "
        f"in {stop['resume_s']:.1f} s; then to the end in {stop['resumed_training_s']:.1f} s.",
        f"At the stop: {stop['ledger_at_stop']}. At the end: {stop['ledger_at_end']}.",
        "",
    ]
