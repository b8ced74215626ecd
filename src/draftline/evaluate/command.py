"""`draftline eval`: from files and names to an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftline.config.schema import TargetConfig
from draftline.decode.sampling import GREEDY, Sampling
from draftline.errors import UserError
from draftline.evaluate.methods import parse_methods
from draftline.evaluate.prompts import EvalPrompt, load_prompt_set
from draftline.evaluate.report import EvalReport
from draftline.evaluate.runner import Progress as Report
from draftline.evaluate.runner import evaluate

if TYPE_CHECKING:
    import torch

    from draftline.drafter.model import Drafter


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
    sampling: Sampling = GREEDY,
    names: Sequence[str] | None = None,
) -> EvalReport:
    """Loads everything and evaluates, with a progress bar on a terminal.

    Args:
        target: the frozen model.
        drafters: exports in z-lab's format, or run folders of ours (the newest checkpoint counts).
        prompts: JSONL files, or `builtin`.
        limit: only the first prompts of each file.
        names: names of the drafters in the report; None makes them from the paths. Others as in `evaluate`.

    Raises:
        UserError: see `evaluate`; files that cannot be read; a tokenizer with more tokens than the target.
    """
    from draftline.target.load import load_target, load_tokenizer, masked_attention

    # A mistake in the methods should not wait for the weights.
    if any(method.is_tree for method in parse_methods(methods)) and target.attention == "auto":
        # The automatic choice may be a backend that takes no ancestor mask.
        target = target.model_copy(update={"attention": masked_attention(target)})
    for path in drafters:
        check_drafter(path)
    tokenizer = load_tokenizer(target)
    sets = _prompt_sets(prompts, tokenizer, limit)
    loaded = load_target(target, device, tokenizer=tokenizer)
    if len(tokenizer) > loaded.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the target's vocabulary {loaded.vocab_size}",
            where=f"target.model {target.model}",
            mend="give the tokenizer that belongs to the target",
        )
    chosen = names or _names(drafters)
    by_name = {
        name: load_drafter(path, loaded.device, loaded.dtype) for name, path in zip(chosen, drafters, strict=True)
    }
    with progress_bar() as progress:
        return evaluate(
            loaded,
            by_name,
            sets,
            methods=methods,
            max_new_tokens=max_new_tokens,
            seed=seed,
            sampling=sampling,
            progress=progress,
        )


def check_drafter(path: Path) -> None:
    """Refuses (UserError) what is no drafter, by its small files alone: before the target is loaded."""
    from draftline.export.zlab import read_spec
    from draftline.pipeline.checkpoint import list_checkpoints

    path = Path(path).expanduser()
    if not path.is_dir():
        raise UserError("no such folder", where=str(path), mend="give an export or a run folder")
    if (path / "config.json").is_file():
        read_spec(path)
    elif not list_checkpoints(path):
        raise UserError("holds no checkpoint", where=str(path), mend="give an export or the output of a training run")


def load_drafter(path: Path, device: torch.device | str, dtype: torch.dtype) -> Drafter:
    """A drafter from an export (config.json in it), or from the newest whole checkpoint of a run folder."""
    from draftline.export.zlab import load_export

    check_drafter(path)
    path = Path(path).expanduser()
    if (path / "config.json").is_file():
        return load_export(path, device, dtype)
    from draftline.pipeline.exporting import drafter_of_run

    return drafter_of_run(path).to(device=device, dtype=dtype).eval()


@contextmanager
def progress_bar() -> Iterator[Report]:
    """A bar on a terminal; in a log a plain line now and then."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_progress(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
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


def _prompt_sets(prompts: Sequence[str | Path], tokenizer: object, limit: int | None) -> dict[str, list[EvalPrompt]]:
    sets: dict[str, list[EvalPrompt]] = {}
    for source in prompts:
        name = Path(source).stem
        if name in sets:
            raise UserError(f"two prompt sets are called {name}", where=str(source), mend="rename one of the files")
        sets[name] = load_prompt_set(source, tokenizer, limit=limit)
    return sets


def _names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path that tells it from the others."""
    for parts in range(1, max((len(p.resolve().parts) for p in paths), default=1) + 1):
        names = ["/".join(p.resolve().parts[-parts:]) for p in paths]
        if len(set(names)) == len(names):
            return names
    raise UserError("a drafter is named twice", where="--drafter", mend="name each once")
