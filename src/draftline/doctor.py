"""`draftline doctor`: checks of this machine, its devices, the data and a run; each finding that is not ok has a mend.

A check is a function `(DoctorContext) -> Iterable[Finding]`. A room adds one by putting it into CHECKS. A check that
has nothing to look at (no data named) yields nothing; one that raises a UserError becomes a failed finding.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftline.config.schema import TargetConfig
from draftline.devices import available_devices, device_memory_bytes, resolve_devices
from draftline.errors import UserError

Level = Literal["ok", "warn", "fail"]

# Releases that draftline is tested with: lowest allowed, first not allowed.
SUPPORTED: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "python": ((3, 11), None),
    "torch": ((2, 11), None),
    "transformers": ((5, 17), (5, 20)),
}
_LITTLE_HOST_BYTES = 4 << 30
_LITTLE_DEVICE_BYTES = 4 << 30
_BUSY_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class DoctorContext:
    """What is to be checked. `target`, `data`, `run` and `config` (YAML file of a run to come) may be left out."""

    target: TargetConfig | None = None
    data: Path | None = None
    devices: tuple[str, ...] = ("auto",)
    run: Path | None = None
    config: Path | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: how it is, and what to do about it if it is not ok."""

    level: Level
    what: str
    mend: str = ""


Check = Callable[[DoctorContext], Iterable[Finding]]


def run_doctor(context: DoctorContext, checks: Sequence[tuple[str, Check]] | None = None) -> list[Finding]:
    """All findings of all checks, in order. A UserError in a check is a failed finding, not an end."""
    findings: list[Finding] = []
    for name, check in all_checks() if checks is None else checks:
        try:
            findings += check(context)
        except UserError as error:
            what = f"{error.where}: {error.what}" if error.where else error.what
            findings.append(Finding("fail", f"{name}: {what}", error.mend or "see the message"))
    return findings


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if anything failed, else 0."""
    return 1 if any(f.level == "fail" for f in findings) else 0


def render(findings: Sequence[Finding], *, table: bool | None = None) -> None:
    """Print the findings: a table on a terminal, plain lines elsewhere (`table` decides where given)."""
    from rich.console import Console

    console = Console(soft_wrap=True)
    if console.is_terminal if table is None else table:
        console.print(_table(findings))
    else:
        for line in plain_lines(findings):
            console.print(line, markup=False, highlight=False)


def plain_lines(findings: Sequence[Finding]) -> list[str]:
    """One line a finding, one more for its mend, and a closing count."""
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{finding.level:4}  {finding.what}")
        if finding.level != "ok":
            lines.append(f"      mend: {finding.mend}")
    counts = {level: sum(f.level == level for f in findings) for level in ("ok", "warn", "fail")}
    return [*lines, f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed"]


def doctor_command(
    *,
    target: str | None,
    data: Path | None,
    devices: Sequence[str],
    run: Path | None = None,
    config: Path | None = None,
    samples: int = 1,
) -> int:
    """Check, print, and give the process's exit code.

    Args:
        samples: how many samples of the data are shown with their loss mask, where data and target are named and sound.
    """
    described = None if target is None else TargetConfig(model=target)
    findings = run_doctor(DoctorContext(described, data, tuple(devices), run, config))
    render(findings)
    code = exit_code(findings)
    if described is not None and data is not None and samples and not code:
        from draftline.data.preview import preview
        from draftline.target.load import load_tokenizer

        preview(data, load_tokenizer(described), n_samples=samples)
    return code


def all_checks() -> tuple[tuple[str, Check], ...]:
    """The checks of this module, and those that lean on other rooms."""
    from draftline import doctor_checks as more

    further = (("template", more.check_template), ("peers", more.check_peers), ("plan", more.check_plan))
    return (*CHECKS, *further, ("serving", more.check_serving))


def check_environment(context: DoctorContext) -> Iterator[Finding]:
    """Releases of what everything stands on, optional readers, cores and host memory."""
    from draftline.target.facts import is_gguf

    for name in SUPPORTED:
        yield _release(name)
    yield _gguf_reader(needed=context.target is not None and is_gguf(context.target))
    yield Finding("ok", f"{os.cpu_count()} CPU cores")
    free, total = device_memory_bytes("cpu")
    what = f"host memory: {_gib(free)} of {_gib(total)} free"
    if free < _LITTLE_HOST_BYTES:
        yield Finding("warn", what, "close other programs, or use a smaller target")
    else:
        yield Finding("ok", what)


def check_devices(context: DoctorContext) -> Iterator[Finding]:
    """Each named device exists and has memory left."""
    for name in dict.fromkeys(resolve_devices(context.devices)):
        if name == "cpu":
            yield _cpu_device()
            continue
        free, total = device_memory_bytes(name)
        what = f"device {name} ({_cuda_name(name)}): {_gib(free)} of {_gib(total)} free"
        if free < max(_LITTLE_DEVICE_BYTES, _BUSY_SHARE * total):
            yield Finding("warn", what, "another process uses it: free it, or name other devices")
        else:
            yield Finding("ok", what)


def check_data(context: DoctorContext) -> Iterator[Finding]:
    """The prepared folder opens whole, is worth training on, and was made with the target's tokenizer."""
    if context.data is None:
        return
    from draftline.data.shards import TokenDataset

    manifest = TokenDataset.open(context.data).manifest
    yield Finding(
        "ok", f"data {context.data}: {manifest.n_samples} samples, {manifest.n_tokens} tokens, all hashes right"
    )
    yield _supervised(manifest.n_supervised / manifest.n_tokens)
    yield _cut(manifest.n_answer_cut / manifest.n_samples, manifest.max_tokens)
    if manifest.label_check is not None:
        yield _own_labels(manifest.label_check.share)
    if context.target is not None:
        yield _same_tokenizer(context.target, context.data)


def check_target(context: DoctorContext) -> Iterator[Finding]:
    """The target's configuration can be read, its weights are there and whole, and they fit on the named devices."""
    if context.target is None:
        return
    from draftline.target.facts import target_facts

    facts = target_facts(context.target)
    kind = "with recurrent layers" if facts.has_recurrent_layers else "attention only"
    yield Finding(
        "ok",
        f"target {context.target.model}: {facts.model_type}, {facts.num_layers} layers ({kind}), hidden size "
        f"{facts.hidden_size}, vocabulary {facts.vocab_size}",
    )
    if facts.num_layers < 4:
        yield Finding("warn", f"{facts.num_layers} layers are few to tap", "name the taps yourself (drafter.taps)")
    yield from _weights(context.target, context.devices)


def check_run(context: DoctorContext) -> Iterator[Finding]:
    """A run folder: configuration, data, checkpoints, ledger, how it ended, its export."""
    if context.run is None:
        return
    from draftline.pipeline.examine import examine_run

    yield from examine_run(context.run)


def _release(name: str) -> Finding:
    lowest, too_new = SUPPORTED[name]
    version = platform.python_version() if name == "python" else _installed(name)
    wanted = f"{_dotted(lowest)} or newer" if too_new is None else f"{_dotted(lowest)} up to below {_dotted(too_new)}"
    if version is None:
        return Finding("fail", f"{name} is not installed", f"install {name} {wanted}")
    number = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if number < lowest or (too_new is not None and number >= too_new):
        return Finding("fail", f"{name} {version} is not supported", f"install {name} {wanted}")
    return Finding("ok", f"{name} {version}")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gguf_reader(*, needed: bool) -> Finding:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if not missing:
        return Finding("ok", ".gguf targets can be read")
    return Finding(
        "fail" if needed else "warn",
        f".gguf targets cannot be read: {' and '.join(missing)} missing",
        "pip install 'draftline[gguf]'",
    )


def _weights(target: TargetConfig, devices: Sequence[str]) -> Iterator[Finding]:
    """Headers and lengths of the weight files; whether every weight is right, the self-test of a run tells."""
    from draftline.target.size import target_size
    from draftline.target.weights import weight_files

    found = weight_files(target)
    if not found.files:
        yield Finding("warn", "the weights are not on this machine", "they will be fetched when they are first used")
        return
    needed = target_size(target).parameters
    size = f"{len(found.files)} weight files, {_gib(found.n_bytes)}"
    if found.elements is not None and found.elements < needed and not _is_packed(target):
        what = f"{size}: {found.elements} of the model's {needed} parameters"
        yield Finding("fail", what, "weights are missing; give the complete model")
        return
    yield Finding("ok", f"{size}, all whole")
    yield from _fits(target, needed, devices)


def _is_packed(target: TargetConfig) -> bool:
    """Quantized checkpoints keep several weights in one number."""
    from draftline.target.facts import load_hf_config

    return getattr(load_hf_config(target), "quantization_config", None) is not None


def _fits(target: TargetConfig, parameters: int, devices: Sequence[str]) -> Iterator[Finding]:
    for name in dict.fromkeys(resolve_devices(devices)):
        dtype = target.dtype if target.dtype != "auto" else "float32" if name == "cpu" else "bfloat16"
        n_bytes = parameters * (4 if dtype == "float32" else 2)
        free, _ = device_memory_bytes(name)
        what = f"the target needs {_gib(n_bytes)} in {dtype} on {name}, {_gib(free)} are free"
        if n_bytes > free:
            yield Finding("fail", what, "use a smaller dtype, another device, or a smaller target")
        else:
            yield Finding("ok", what)


def _cpu_device() -> Finding:
    gpus = [name for name in available_devices() if name != "cpu"]
    if gpus:
        return Finding("warn", "device cpu is named although there are GPUs", f"use {', '.join(gpus)}")
    return Finding("ok", "device cpu (no CUDA device here)")


def _cuda_name(device: str) -> str:
    import torch

    return str(torch.cuda.get_device_name(device))


def _supervised(share: float) -> Finding:
    what = f"{share:.0%} of the tokens are supervised"
    if share < 0.05:
        return Finding("warn", what, "most of each row is prompt: shorten prompts or regenerate longer answers")
    return Finding("ok", what)


def _cut(share: float, max_tokens: int) -> Finding:
    what = f"{share:.0%} of the answers were cut by a length limit (samples of up to {max_tokens} tokens)"
    if share > 0.5:
        return Finding("warn", what, "raise --max-new-tokens of regenerate or --max-tokens of prepare")
    return Finding("ok", what)


def _own_labels(share: float) -> Finding:
    from draftline.data.manifest import LOW_LABEL_SHARE

    what = f"{share:.0%} of the labels looked at are the target's own first choice"
    if share < LOW_LABEL_SHARE:
        return Finding("warn", what, "let the target answer the prompts itself (`draftline regenerate`)")
    return Finding("ok", what)


def _same_tokenizer(target: TargetConfig, data: Path) -> Finding:
    from draftline.data.manifest import read_manifest, require_tokenizer
    from draftline.target.load import load_tokenizer

    require_tokenizer(read_manifest(data), load_tokenizer(target), where=str(data))
    return Finding("ok", "the data was prepared with this target's tokenizer")


def _table(findings: Sequence[Finding]) -> object:
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table("", "finding", "mend", title="draftline doctor")
    for finding in findings:
        mend = "" if finding.level == "ok" else finding.mend
        table.add_row(Text(finding.level, style=colours[finding.level]), Text(finding.what), Text(mend))
    return table


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB"


def _dotted(number: tuple[int, ...]) -> str:
    return ".".join(map(str, number))


CHECKS: tuple[tuple[str, Check], ...] = (
    ("environment", check_environment),
    ("devices", check_devices),
    ("target", check_target),
    ("data", check_data),
    ("run", check_run),
)
