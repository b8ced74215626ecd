"""README.md of an export: what it is, how it is served, what it was trained on and how, and how well it drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from draftline import __version__
from draftline.config.drafter_spec import DrafterSpec
from draftline.export.common import ExportFormat, slides
from draftline.export.serving import serve_commands

FORMAT_NAMES: dict[str, str] = {"zlab": "z-lab's DFlash format", "speculators": "speculators' format"}
PREFIX_CACHE_WARNING = (
    "Tokens that a server restores from its prefix cache give the drafter no context, and acceptance falls to about 1: "
    "keep prefix caching off, or measure with it."
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


def model_card(spec: DrafterSpec, *, form: ExportFormat, dtype: str, provenance: Mapping[str, Any]) -> str:
    """Markdown text. What is not in `provenance` is said to be unknown, never made up.

    Args:
        provenance: see `pipeline/exporting.py`; every key is optional.
    """
    target = _one_line(provenance.get("target") or "TARGET")
    parts = [
        _front_matter(provenance),
        f"# {'DFlash' if spec.dflash2 is None else 'DFlash2'} drafter for {target}\n\n"
        f"A block drafter for speculative decoding, in {FORMAT_NAMES[form]} ({dtype}), written by draftline "
        f"{__version__}. " + _contents(spec),
        "## Serving\n\nNot run by draftline's own tests:\n\n" + _commands(spec, form, target),
        _serving_notes(provenance),
        "## Drafter\n\n" + _table(_drafter_rows(spec)),
        "## Acceptance\n\n" + _acceptance(provenance),
        "## Training\n\n" + _training(provenance),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _contents(spec: DrafterSpec) -> str:
    if spec.draft_vocabulary is None:
        return "It holds the drafter's own layers only; embedding and head are the target's."
    return (
        f"It drafts {len(spec.draft_vocabulary)} of the target's {spec.vocab_size} tokens, and holds their rows of the "
        "target's head beside the drafter's own layers."
    )


def _front_matter(provenance: Mapping[str, Any]) -> str:
    lines = ["---", "library_name: transformers", "tags:", "- speculative-decoding", "- dflash"]
    target = str(provenance.get("target") or "")
    if _HUB_ID.fullmatch(target):  # not a path of somebody's machine, nor anything that YAML takes otherwise
        lines.append(f"base_model: {target}")
    return "\n".join([*lines, "---"])


def _commands(spec: DrafterSpec, form: ExportFormat, target: str) -> str:
    commands = serve_commands(spec, form, "PATH-OF-THIS-FOLDER", target)
    return "\n\n".join(f"{server}:\n\n    {command}" for server, command in commands.items())


def _serving_notes(provenance: Mapping[str, Any]) -> str:
    lines = [f"- {PREFIX_CACHE_WARNING}"]
    if "chat_template_kwargs" in provenance:
        given = provenance["chat_template_kwargs"]
        words = f"`{json.dumps(given)}`" if given else "none"
        lines.append(f"- Chat template arguments in training: {words}. Serve with the same, or acceptance suffers.")
    if provenance.get("target_is_recurrent"):
        lines.append("- The target has recurrent layers: do not decode with `dflash` 0.1.0, whose text would be wrong.")
    return "\n".join(lines)


def _drafter_rows(spec: DrafterSpec) -> list[tuple[str, Any]]:
    rows = [
        ("layers", spec.num_layers),
        ("block size", f"{spec.block_size} ({spec.block_size - 1} drafts a round)"),
        ("taps (0-based target layers, their output)", ", ".join(map(str, spec.taps))),
        ("mask token", spec.mask_token_id),
        ("hidden, MLP", f"{spec.hidden_size}, {spec.intermediate_size}"),
        ("heads", f"{spec.num_heads} / {spec.num_kv_heads} of {spec.head_dim}"),
        ("rotary", json.dumps(spec.rope_parameters)),
    ]
    if spec.dflash2 is not None:
        rows.append(("convolutions", f"{spec.dflash2.conv_kernel_size} taps, groups of {spec.dflash2.conv_group_size}"))
        sizes = f"rank {spec.dflash2.selector_rank}, {spec.dflash2.selector_top_k} candidates"
        rows.append(("candidate selector", sizes))
    if slides(spec):
        kinds = ", ".join(kind.removesuffix("_attention") for kind in spec.layer_types)
        rows.append(("attention", f"{kinds}; window {spec.sliding_window} from the {spec.window_origin}"))
        rows.append(("inside a block", spec.in_block_attention))
    return rows


def _acceptance(provenance: Mapping[str, Any]) -> str:
    lines = []
    if "validation_acceptance" in provenance:
        value = float(provenance["validation_acceptance"])
        lines.append(f"Acceptance length on the validation rows, teacher-forced: {value:.2f}.")
    results: Sequence[Mapping[str, Any]] = provenance.get("evaluation") or ()
    if results:
        lines.append(_one_line(provenance.get("evaluation_definition", "")))
        head = "| prompts | method | acceptance length | 95 % | prompts in it |\n|---|---|---|---|---|\n"
        lines.append(head + "\n".join(_result_row(r) for r in results))
    return "\n\n".join(line for line in lines if line) or "Not measured yet: `draftline eval`."


def _result_row(result: Mapping[str, Any]) -> str:
    value, interval = result.get("acceptance_length"), result.get("interval")
    shown = "-" if value is None else f"{value:.2f}"
    between = "-" if not interval else f"{interval[0]:.2f} to {interval[1]:.2f}"
    return (
        f"| {_cell(result['prompt_set'])} | {_cell(result['method'])} | {shown} | {between} | {result['n_prompts']} |"
    )


def _training(provenance: Mapping[str, Any]) -> str:
    rows: list[tuple[str, Any]] = []
    if "imported_from" in provenance:
        rows.append(("imported from", provenance["imported_from"]))
    data = provenance.get("data")
    if isinstance(data, Mapping):
        rows += [(f"data: {name}", _short(value)) for name, value in data.items()]
    if "data_fingerprint" in provenance:
        rows.append(("data fingerprint", provenance["data_fingerprint"]))
    if provenance.get("target_revision"):
        rows.append(("target revision", provenance["target_revision"]))
    if "committed_rows" in provenance:
        rows.append(("rows trained", provenance["committed_rows"]))
    for section in ("draft_vocabulary", "recipe", "objective"):
        values = provenance.get(section)
        if isinstance(values, Mapping):
            rows += [(f"{section.replace('_', ' ')}: {name}", _short(value)) for name, value in values.items()]
    return _table(rows) if rows else "Not recorded."


def _short(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list, tuple)) else str(value)


def _table(rows: Sequence[tuple[str, Any]]) -> str:
    return "| | |\n|---|---|\n" + "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in rows)


def _cell(value: object) -> str:
    return _one_line(value).replace("|", "/")


def _one_line(value: object) -> str:
    """Names and facts may be anybody's: none of them begins a line of its own."""
    return " ".join(str(value).splitlines())
