"""Which drafter of a run: its newest whole checkpoint, the best by validation, or the one of a round."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftline.errors import UserError
from draftline.pipeline.checkpoint import checkpoint_root, latest_checkpoint, list_checkpoints

BEST_FOLDER = "best"
NEWEST = "newest"
_MOST_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen.

    Attributes:
        folder: a checkpoint, or an export (`best`).
        is_export: True for an export.
        passed_over: newer checkpoints that are not whole, one line each.
    """

    folder: Path
    is_export: bool
    passed_over: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """For people: `best by validation`, or the checkpoint's name."""
        return "best by validation" if self.is_export else self.folder.name


def choose_checkpoint(run: Path, which: str = NEWEST) -> Choice:
    """Finds a drafter of a run.

    Args:
        run: output folder of a training run.
        which: `newest`, `best`, or the number of a round.

    Raises:
        UserError: there is no such checkpoint, or none that is whole.
    """
    if which == NEWEST:
        found = latest_checkpoint(run)
        if found is None:
            raise UserError("holds no checkpoint", where=str(run), mend="give the output folder of `draftline train`")
        return Choice(found[0], False, tuple(found[1]))
    if which == BEST_FOLDER:
        if not (run / BEST_FOLDER / "config.json").is_file():
            raise UserError(
                "no drafter was chosen by validation",
                where=str(run / BEST_FOLDER),
                mend="train with data.validation_path set, or use --checkpoint newest",
            )
        return Choice(run / BEST_FOLDER, True)
    if not (which.isascii() and which.isdecimal() and len(which) <= _MOST_DIGITS):
        raise UserError(
            f"{which[:80]!r} is no checkpoint", where="--checkpoint", mend="use newest, best or a round's number"
        )
    folder = checkpoint_root(run) / f"round-{int(which):08d}"
    if not folder.is_dir():
        kept = ", ".join(str(int(p.name.removeprefix("round-"))) for p in list_checkpoints(run)) or "none"
        raise UserError(f"there is no checkpoint of round {int(which)}", where=str(run), mend=f"kept are: {kept}")
    return Choice(folder, False)
