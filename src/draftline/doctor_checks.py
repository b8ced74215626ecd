"""Checks of the doctor that lean on other rooms: the chat template, peers, the plan's memory, serving of an export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from draftline.devices import device_memory_bytes, resolve_devices
from draftline.doctor import DoctorContext, Finding, Level
from draftline.errors import UserError

if TYPE_CHECKING:
    from draftline.target.facts import TargetFacts

_CONVERSATION = (
    {"role": "user", "content": "How many legs has a spider?"},
    {"role": "assistant", "content": "Eight."},
    {"role": "user", "content": "And an ant?"},
    {"role": "assistant", "content": "Six, like every insect."},
)
_TIGHT_SHARE = 0.9
# By the largest part of a device's memory: what makes it smaller.
_SMALLER = {
    "target weights": "spread the target over devices, quantize it (target.quantization) or use a larger device",
    "target forward": "lower data.row_tokens",
    "rows admitted": "lower pipeline.hs_queue_depth or data.row_tokens",
    "drafter state": "lower drafter.num_layers, or use a larger device",
    "activations": "lower objective.anchors or objective.head_chunk_positions",
    "averaging": "use sync.moments keep",
    "embedding and head": "use a larger device",
}


def check_template(context: DoctorContext) -> Iterator[Finding]:
    """A plain conversation of two answers is rendered, and both of them are supervised."""
    if context.target is None:
        return
    from draftline.data.chat import ChatEncoder
    from draftline.data.marking import RejectedError
    from draftline.data.template import ChatTemplate
    from draftline.target.facts import target_facts
    from draftline.target.load import load_tokenizer

    try:
        target_facts(context.target)
    except UserError:  # no target: its own check says so
        return
    kwargs = context.target.chat_template_kwargs
    template = ChatTemplate(load_tokenizer(context.target), template_kwargs=kwargs)
    try:
        encoded = ChatEncoder(template, max_tokens=4096).encode(list(_CONVERSATION))
    except RejectedError as error:
        what = f"the chat template cannot be supervised on a plain conversation: {error}"
        yield Finding("warn", what, "mend the template, or give its arguments (target.chat_template_kwargs)")
        return
    supervised = f"{sum(encoded.loss_mask)} of {len(encoded.loss_mask)} tokens"
    what = f"chat template: {supervised} of a plain conversation are supervised"
    if encoded.turns_left_out:
        rewritten = f"{what}; it rewrites {encoded.turns_left_out} of 2 answers once others follow, which are left out"
        yield Finding("warn", rewritten, "prepare with --turns last, or give the template's arguments")
    else:
        yield Finding("ok", what)


def check_peers(context: DoctorContext) -> Iterator[Finding]:
    """GPUs that are named reach each other's memory."""
    try:
        named = [part for name in resolve_devices(context.devices) for part in name.split("+")]
    except UserError:  # no such device: its own check says so
        return
    names = [name for name in dict.fromkeys(named) if name.startswith("cuda")]
    if len(names) < 2:
        return
    apart = [f"{a} and {b}" for i, a in enumerate(names) for b in names[i + 1 :] if not _reaches(a, b)]
    if apart:
        shown = ", ".join(apart[:4]) + (f" and {len(apart) - 4} pairs more" if len(apart) > 4 else "")
        mend = "rows between them go through host memory: let targets and drafters that share a link work together"
        yield Finding("warn", f"no peer access between {shown}", mend)
    else:
        yield Finding("ok", f"{len(names)} GPUs reach each other's memory")


def check_plan(context: DoctorContext) -> Iterator[Finding]:
    """What the run of a configuration needs of each device is free there."""
    if context.config is None:
        return
    from draftline.config.load import load_config
    from draftline.pipeline.runplan import estimate_memory, make_run_plan

    plan = make_run_plan(load_config([context.config]))
    workers = f"{plan.num_targets} targets, {plan.num_drafters} drafters"
    yield Finding("ok", f"{context.config}: {len(plan.rows)} rows, {workers}")
    for memory in estimate_memory(plan):
        free, _ = device_memory_bytes(memory.device)
        part, largest = max(memory.parts.items(), key=lambda item: item[1])
        needed = memory.total_bytes
        what = f"{memory.device}: the run needs about {_gib(needed)} ({part} {_gib(largest)}), {_gib(free)} are free"
        mend = _SMALLER.get(part, "use a larger device")
        level: Level = "fail" if needed > free else "warn" if needed > _TIGHT_SHARE * free else "ok"
        yield Finding(level, what, "" if level == "ok" else mend)


def check_serving(context: DoctorContext) -> Iterator[Finding]:
    """Which servers would run the exports of a run as they were trained."""
    if context.run is None:
        return
    from draftline.target.facts import target_facts

    try:
        target = None if context.target is None else target_facts(context.target)
    except UserError:  # no target: its own check says so
        target = None
    for name in ("export", "best"):
        if (context.run / name / "config.json").is_file():
            yield from _served(context.run / name, target)


def _served(folder: Path, target: TargetFacts | None) -> Iterator[Finding]:
    from draftline.export.check import check_export

    report = check_export(folder, target=target)
    for finding in report.findings:
        if finding.level == "refuse":
            yield Finding("warn", f"{folder}, {finding.server}: {finding.what}", finding.mend)
    if report.good_for:
        yield Finding("ok", f"{folder} would be served as it was trained by {', '.join(report.good_for)}")
    else:
        mend = "see the lines above, or `draftline export --check`"
        yield Finding("fail", f"{folder} would be served as it was trained by no server", mend)


def _reaches(a: str, b: str) -> bool:
    """Both ways, so that a row may go from either to the other."""
    import torch

    return bool(torch.cuda.can_device_access_peer(a, b)) and bool(torch.cuda.can_device_access_peer(b, a))


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB"
