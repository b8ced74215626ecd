"""Which page of the documentation explains an error: that of the room in which it was raised."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent
# Beginnings of module paths, the longest that fits wins. None: a module that serves all rooms; its caller counts.
_PAGES: dict[str, str | None] = {
    "capacity": "planning",
    "cli": None,
    "cluster": "cluster",
    "config": "configuration",
    "data": "data",
    "data/servers": "servers",
    "decode": "evaluation",
    "demo": "tutorial",
    "devices": None,
    "doctor": "monitoring",
    "drafter": "objective",
    "drafter/compile_cache": "pipeline",
    "drafter/head_fp8": "configuration",
    "drafter/model": "howto-model",
    "drafter/schedule": "configuration",
    "drafter/spec": "howto-model",
    "drafter/sync": "pipeline",
    "drafter/warm_start": "howto-model",
    "errors": None,
    "evaluate": "evaluation",
    "export": "checkpoints-and-export",
    "limits": None,
    "live": "monitoring",
    "monitor": "monitoring",
    "pipeline": "pipeline",
    "pipeline/ceilings": "planning",
    "pipeline/checkpoint": "howto-resume",
    "pipeline/choice": "checkpoints-and-export",
    "pipeline/core/ledger": "howto-resume",
    "pipeline/examine": "monitoring",
    "pipeline/exporting": "checkpoints-and-export",
    "pipeline/long_rows": "howto-data",
    "pipeline/measure": "planning",
    "pipeline/plan": "planning",
    "pipeline/planning": "planning",
    "pipeline/profiling": "monitoring",
    "pipeline/provenance": "checkpoints-and-export",
    "pipeline/pruning": "checkpoints-and-export",
    "pipeline/run_folder": "howto-resume",
    "pipeline/runplan": "howto-data",
    "pipeline/start_checks": "configuration",
    "pipeline/states": "states",
    "pipeline/warm_spec": "checkpoints-and-export",
    "products": None,
    "records": None,
    "report": "howto-report",
    "report/perfetto": "monitoring",
    "target": "howto-model",
    "target/quantized": "states",
    "target/remote": "states",
    "target/spread": "states",
    "target/states": "states",
}


def page_of(error: BaseException) -> str | None:
    """Path of the page in the project, or None if the error was raised where no room is."""
    modules = []
    trace = error.__traceback__
    while trace is not None:
        modules.append(Path(trace.tb_frame.f_code.co_filename))
        trace = trace.tb_next
    for file in reversed(modules):
        if file.is_relative_to(_PACKAGE) and (page := page_of_module(file.relative_to(_PACKAGE))):
            return f"docs/{page}.md"
    return None


def page_of_module(module: Path) -> str | None:
    """Name of the page for a module, given by its path inside the package."""
    name = module.with_suffix("").as_posix()
    fitting = [start for start in _PAGES if name == start or name.startswith((f"{start}/", f"{start}_"))]
    return _PAGES[max(fitting, key=len)] if fitting else None
