"""Sessions for decoding one prompt at a time: ordinary ones, or compiled ones with buffers that all prompts share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from draftline.decode.chain import BoundDrafter
from draftline.decode.static_call import CompileMode, StaticCompiler
from draftline.decode.static_drafter import StaticDrafter
from draftline.decode.static_target import StaticTarget
from draftline.decode.steps import DraftModel, SoloSession
from draftline.decode.target_session import TargetSession

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget


class Sessions:
    """Opens a session for each prompt. Use it with `with`.

    Args:
        target: the frozen model.
        drafters: by name.
        mode: `off` for ordinary sessions.
        columns: longest text with the drafts of its last round (compiled sessions only).

    Attributes:
        drafters: the given ones, or their compiled forms.
    """

    def __init__(
        self, target: LoadedTarget, drafters: Mapping[str, DraftModel], mode: CompileMode, columns: int
    ) -> None:
        self._target = target
        self._static: StaticTarget | None = None
        self._warmed: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self.drafters = dict(drafters)
        if mode != "off":
            compiler = StaticCompiler(mode, target.device)
            self._static = StaticTarget(target, columns, compiler)
            self.drafters = {
                name: StaticDrafter(drafter, columns, compiler) if isinstance(drafter, BoundDrafter) else drafter
                for name, drafter in drafters.items()
            }

    def __enter__(self) -> Sessions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._static is not None:
            self._static.close()

    def open(self, taps: Sequence[int], widths: Sequence[int]) -> SoloSession:
        """An empty session. Compiled forms of the widths are made before the first one is handed out."""
        if self._static is None:
            return TargetSession(self._target, taps)
        key = tuple(taps), tuple(widths)
        if key not in self._warmed:
            self._warmed.add(key)
            self._static.warm(taps, widths)
            for drafter in self.drafters.values():
                if isinstance(drafter, StaticDrafter):
                    drafter.warm()
        return self._static.session(taps, widths)
