"""`draftline eval`: from files and names to an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftline.config.schema import TargetConfig
from draftline.data.conversations import Tally
from draftline.errors import UserError
from draftline.evaluate.entries import Decoding
from draftline.evaluate.methods import parse_methods, require_drafters
from draftline.evaluate.prompts import EvalPrompt, load_prompt_set
from draftline.evaluate.report import EvalReport
from draftline.evaluate.runner import ONE_AT_A_TIME, evaluate
from draftline.evaluate.runner import Progress as Report
from draftline.pipeline.choice import NEWEST, choose_checkpoint

if TYPE_CHECKING:
    import torch

    from draftline.drafter.model import Drafter
    from draftline.target.load import LoadedTarget


def evaluate_files(
    target: TargetConfig,
    drafters: Sequence[Path],
    prompts: Sequence[str | Path],
    *,
    methods: Sequence[str],
    max_new_tokens: int,
    limit: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    decoding: Decoding = ONE_AT_A_TIME,
    names: Sequence[str] | None = None,
    checkpoint: str = NEWEST,
    skip_bad_rows: bool = False,
) -> EvalReport:
    """Loads everything and evaluates, with a progress bar on a terminal.

    Args:
        target: the frozen model.
        drafters: exports in z-lab's or speculators' format, or run folders of ours.
        prompts: JSONL files, or `builtin`.
        limit: only the first prompts of each file.
        names: names of the drafters in the report; None makes them from the paths.
        checkpoint: of run folders: `newest`, `best` or the number of a round.
        skip_bad_rows: leave bad rows of the prompt files out, instead of refusing them. Others as in `evaluate`.

    Raises:
        UserError: see `evaluate`; files that cannot be read; a tokenizer with more tokens than the target.
    """
    from draftline.target.facts import target_facts
    from draftline.target.load import load_tokenizer

    # A mistake in the methods should not wait for the weights.
    require_drafters(parse_methods(methods), len(drafters))
    target = _with_masks(target, methods, decoding)
    sources = [find_drafter(path, checkpoint) for path in drafters]
    layers = target_facts(target).num_layers if drafters else None
    for source in sources:
        source.check(num_target_layers=layers)
    tokenizer = load_tokenizer(target)
    tally = Tally(skip_bad_rows=skip_bad_rows)
    sets = _prompt_sets(prompts, tokenizer, limit, tally, target.chat_template_kwargs)
    loaded = _load(target, device, tokenizer)
    chosen = names or _names(drafters)
    by_name = {
        name: source.load(loaded.device, loaded.dtype, num_target_layers=layers)
        for name, source in zip(chosen, sources, strict=True)
    }
    with progress_bar() as progress:
        report = evaluate(
            loaded,
            by_name,
            sets,
            methods=methods,
            max_new_tokens=max_new_tokens,
            seed=seed,
            decoding=decoding,
            progress=progress,
        )
    return _with_sources(report, dict(zip(chosen, sources, strict=True)), tally)


def _with_masks(target: TargetConfig, methods: Sequence[str], decoding: Decoding) -> TargetConfig:
    """The target with an attention backend that takes masks of ours, where the methods need them."""
    from draftline.target.backend import masked_attention

    needed = any(method.is_tree for method in parse_methods(methods)) or decoding.batch > 1 or decoding.compile != "off"
    if not needed or target.attention != "auto":
        return target
    return target.model_copy(update={"attention": masked_attention(target)})


def _load(target: TargetConfig, device: str, tokenizer: Any) -> LoadedTarget:
    from draftline.target.load import load_target

    loaded = load_target(target, device, tokenizer=tokenizer)
    if len(tokenizer) > loaded.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the target's vocabulary {loaded.vocab_size}",
            where=f"target.model {target.model}",
            mend="give the tokenizer that belongs to the target",
        )
    return loaded


@dataclass(frozen=True, slots=True)
class DrafterSource:
    """A drafter on disk.

    Attributes:
        path: as given: an export, or a run folder.
        folder: what is read: an export, or a checkpoint of the run.
        label: which checkpoint of a run; None for an export.
        passed_over: newer checkpoints of the run that are not whole, one line each.
    """

    path: Path
    folder: Path
    label: str | None
    passed_over: tuple[str, ...] = ()

    @property
    def is_export(self) -> bool:
        """True if the folder is an export, not a run."""
        return (self.folder / "config.json").is_file()

    def check(self, *, num_target_layers: int | None = None) -> None:
        """Refuses (UserError) what is no drafter, by its small files alone: before the target is loaded."""
        from draftline.export.formats import read_drafter_spec

        if self.is_export:
            read_drafter_spec(self.folder, num_target_layers=num_target_layers)

    def load(self, device: torch.device | str, dtype: torch.dtype, *, num_target_layers: int | None = None) -> Drafter:
        """The drafter in evaluation mode.

        Args:
            num_target_layers: of the target; speculators' format does not tell it.
        """
        from draftline.export.formats import load_drafter_export
        from draftline.pipeline.exporting import drafter_of_checkpoint

        if self.is_export:
            return load_drafter_export(self.folder, device, dtype, num_target_layers=num_target_layers)
        return drafter_of_checkpoint(self.folder).to(device=device, dtype=dtype).eval()

    def facts(self) -> dict[str, str]:
        """For the report."""
        named = {"path": str(self.path)}
        return named if self.label is None else named | {"checkpoint": self.label}


def find_drafter(path: Path, checkpoint: str = NEWEST) -> DrafterSource:
    """A drafter from an export of any format (config.json in it), or from a checkpoint of a run folder.

    Raises:
        UserError: no such folder, or no such checkpoint in it.
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        raise UserError("no such folder", where=str(path), mend="give an export or a run folder")
    if (path / "config.json").is_file():
        if checkpoint != NEWEST:
            raise UserError("is an export, which holds one drafter", where=str(path), mend="leave --checkpoint out")
        return DrafterSource(path, path, None)
    choice = choose_checkpoint(path, checkpoint)
    return DrafterSource(path, choice.folder, choice.label, choice.passed_over)


def _with_sources(report: EvalReport, sources: Mapping[str, DrafterSource], tally: Tally) -> EvalReport:
    """The report with where each drafter came from, and with the checkpoints and rows that were left out."""
    drafters = {name: facts | sources[name].facts() for name, facts in report.drafters.items()}
    passed = [f"drafter {name}: passed over {line}" for name in sources for line in sources[name].passed_over]
    warnings = [*report.warnings, *passed, *_left_out(tally)]
    return report.model_copy(update={"drafters": drafters, "warnings": warnings})


def load_drafter(path: Path, device: torch.device | str, dtype: torch.dtype) -> Drafter:
    """A drafter from an export, or from the newest whole checkpoint of a run folder."""
    source = find_drafter(path)
    source.check()
    return source.load(device, dtype)


@contextmanager
def progress_bar() -> Iterator[Report]:
    """A bar on a terminal; in a log a plain line now and then."""
    console = Console(stderr=True, markup=False, emoji=False)  # drafters are named after folders, whatever these hold
    if not console.is_terminal:
        yield _plain_progress(console)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("decoding", total=None)
        yield lambda done, total, label: bar.update(task, completed=done, total=total, description=label)


def _plain_progress(console: Console) -> Report:
    shown = {0}

    def report(done: int, total: int, label: str) -> None:
        tenth = 10 * done // total
        if tenth not in shown:
            shown.add(tenth)
            console.print(f"evaluation: {done} of {total} generations, now {label}", highlight=False)

    return report


def _prompt_sets(
    prompts: Sequence[str | Path],
    tokenizer: object,
    limit: int | None,
    tally: Tally,
    template_kwargs: Mapping[str, Any],
) -> dict[str, list[EvalPrompt]]:
    sets: dict[str, list[EvalPrompt]] = {}
    for source in prompts:
        name = Path(source).stem
        if name in sets:
            raise UserError(f"two prompt sets are called {name}", where=str(source), mend="rename one of the files")
        sets[name] = load_prompt_set(source, tokenizer, limit=limit, tally=tally, template_kwargs=template_kwargs)
    return sets


def _left_out(tally: Tally) -> list[str]:
    if not tally.n_rejected:
        return []
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(tally.rejected.items()))
    return [f"{tally.n_rejected} rows of the prompt files were left out ({reasons}); first: {tally.first_bad}"]


def _names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path that tells it from the others."""
    for parts in range(1, max((len(p.resolve().parts) for p in paths), default=1) + 1):
        names = ["/".join(p.resolve().parts[-parts:]) for p in paths]
        if len(set(names)) == len(names):
            return names
    raise UserError("a drafter is named twice", where="--drafter", mend="name each once")
