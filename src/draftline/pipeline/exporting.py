"""From a run folder to an export: the last whole checkpoint's masters in z-lab's format."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from draftline.config.drafter_spec import DrafterSpec
from draftline.drafter.model import Drafter
from draftline.errors import UserError
from draftline.export.zlab import export_zlab
from draftline.pipeline.checkpoint import CheckpointError, latest_checkpoint, read_checkpoint


def drafter_of_run(run: Path) -> Drafter:
    """The drafter of a run's newest whole checkpoint, fp32, on the CPU.

    Raises:
        UserError: the folder holds no checkpoint, or none that is whole.
    """
    found = latest_checkpoint(run)
    if found is None:
        raise UserError("holds no checkpoint", where=str(run), mend="give the output folder of `draftline train`")
    checkpoint = read_checkpoint(found[0])
    try:
        drafter = Drafter(DrafterSpec.model_validate(checkpoint.state.get("spec")))
        drafter.load_state_dict(checkpoint.weights)
    except (ValidationError, RuntimeError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{found[0]}: weights and description do not make a drafter ({reason})") from error
    return drafter


def export_run(run: Path, output: Path, *, dtype: str = "bfloat16") -> Path:
    """Exports the newest whole checkpoint of `run` to `output`. Returns `output`."""
    if dtype not in ("bfloat16", "float32"):
        raise UserError(f"dtype {dtype!r} is not known", where="--dtype", mend="use bfloat16 or float32")
    export_zlab(drafter_of_run(run), output, dtype=dtype)
    return output
