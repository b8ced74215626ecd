"""Where a run's drafter comes from, as plain facts for its card: target, data, recipe, acceptance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftline.config.load import load_config
from draftline.config.schema import RunConfig
from draftline.data.manifest import DatasetManifest, read_manifest
from draftline.errors import UserError
from draftline.export.card_facts import checked_facts
from draftline.export.common import read_provenance
from draftline.pipeline.meeting import BEST
from draftline.pipeline.run_folder import CONFIG_FILE
from draftline.target.facts import TargetFacts, target_facts


def run_provenance(run: Path, *, committed_rows: int | None = None) -> dict[str, Any]:
    """Facts of a run folder. What cannot be read any more (moved data, a target that is gone) is left out.

    Args:
        committed_rows: rows that the exported weights were trained on.
    """
    config = load_config([run / CONFIG_FILE])
    facts = provenance(config, _or_none(target_facts, config.target), _or_none(read_manifest, config.data.path))
    if committed_rows is not None:
        facts["committed_rows"] = committed_rows
        best = _or_none(read_provenance, run / BEST) or {}
        if best.get("committed_rows") == committed_rows and "validation_acceptance" in best:
            facts["validation_acceptance"] = best["validation_acceptance"]
    return facts


def provenance(config: RunConfig, facts: TargetFacts | None, data: DatasetManifest | None) -> dict[str, Any]:
    """JSON-able facts; see `export/model_card.py` for what is told of them."""
    found: dict[str, Any] = {
        "target": config.target.model,
        "target_revision": config.target.revision,
        "chat_template_kwargs": config.target.chat_template_kwargs,
        "recipe": _recipe(config),
        "objective": config.objective.model_dump(mode="json"),
    }
    if facts is not None:
        found["target_architectures"] = list(facts.architectures)
        found["target_is_recurrent"] = facts.has_recurrent_layers
    if data is not None:
        found["data_fingerprint"] = data.fingerprint
        found["data"] = {
            "samples": data.n_samples,
            "tokens": data.n_tokens,
            "supervised tokens": data.n_supervised,
            "sources": [Path(source.name).name for source in data.sources],
        }
    return found


def evaluation_facts(reports: Sequence[Path], drafter: str | None = None) -> dict[str, Any]:
    """Acceptance numbers out of reports of `draftline eval --output`, for the card.

    Args:
        drafter: name of the drafter in the reports; None takes all of them.

    Raises:
        UserError: a file that is no such report.
    """
    rows: list[dict[str, Any]] = []
    definition = ""
    for path in reports:
        content = _read_report(path)
        definition = str(content.get("definition", ""))
        for result in content["results"]:
            if result.get("drafter") is None or drafter not in (None, result["drafter"]):
                continue
            names = ("prompt_set", "method", "acceptance_length", "interval", "n_prompts")
            rows.append({name: result.get(name) for name in names})
    return checked_facts({"evaluation": rows, "evaluation_definition": definition}, "--report") if rows else {}


def _read_report(path: Path) -> Mapping[str, Any]:
    mend = "give a report of `draftline eval --output`"
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot be read ({error})", where=str(path), mend=mend) from error
    results = content.get("results") if isinstance(content, dict) else None
    if not isinstance(results, list) or not all(isinstance(r, dict) and "method" in r for r in results):
        raise UserError("is no evaluation report", where=str(path), mend=mend)
    return dict(content)


def _recipe(config: RunConfig) -> dict[str, Any]:
    optimizer = config.optimizer
    return {
        "epochs": config.epochs,
        "seed": config.seed,
        "row tokens": config.data.row_tokens,
        "optimizer": optimizer.kind,
        "learning rate": optimizer.learning_rate,
        "schedule": optimizer.schedule.kind,
        "rows a step": optimizer.accumulate_rows,
        "drafters": len(config.pipeline.drafter_devices),
        "sync": config.sync.kind,
        "start": config.drafter.init if config.drafter.init_from is None else "checkpoint",
    }


def _or_none(read: Any, argument: Any) -> Any:
    try:
        return read(argument)
    except UserError:
        return None
