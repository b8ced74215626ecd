"""Any drafter that we can read, whatever its format: found out from config.json."""

from __future__ import annotations

from pathlib import Path

import torch

from draftline.config.drafter_spec import DrafterSpec
from draftline.drafter.model import Drafter
from draftline.errors import UserError
from draftline.export.common import ExportFormat
from draftline.export.files import read_json
from draftline.export.speculators import load_speculators, read_speculators_spec
from draftline.export.zlab import load_export, read_spec
from draftline.export.zlab_config import ARCHITECTURE, ARCHITECTURE_2, architectures


def detect_format(path: Path) -> ExportFormat:
    """Which format a folder is in.

    Raises:
        UserError: no config.json, or one of a model that is no drafter.
    """
    config = read_json(Path(path).expanduser() / "config.json")
    if "speculators_model_type" in config:
        return "speculators"
    found = architectures(config)
    if "dflash_config" in config or {ARCHITECTURE, ARCHITECTURE_2} & set(found):
        return "zlab"
    names = ", ".join(found)
    raise UserError(
        f"{f'architecture {names}' if names else 'no architecture'}: no drafter in z-lab's or speculators' format",
        where=str(Path(path) / "config.json"),
        mend="give the folder of a DFlash drafter",
    )


def read_drafter_spec(path: Path, *, num_target_layers: int | None = None) -> DrafterSpec:
    """The spec of an export in any format, without its weights. Errors as for the format's own reader."""
    path = Path(path).expanduser()
    if detect_format(path) == "speculators":
        return read_speculators_spec(path, num_target_layers)
    return read_spec(path)


def load_drafter_export(
    path: Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    num_target_layers: int | None = None,
) -> Drafter:
    """A drafter from an export in any format, as it was trained. Arguments and errors as for `load_export`.

    Args:
        num_target_layers: of the target; speculators' format does not tell it.
    """
    if detect_format(path) == "speculators":
        return load_speculators(path, device, dtype, num_target_layers=num_target_layers)
    return load_export(path, device, dtype)
