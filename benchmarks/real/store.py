"""Results on disk: one JSON file a part, and one file that holds them all."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftline.errors import DraftlineError, RunStoppedError, UserError

Figures = dict[str, Any]
SCHEMA_VERSION = 1


# What a part may end in; whatever else is raised ends the run.
FAILURES = (DraftlineError, RuntimeError, ValueError, TypeError, LookupError, AttributeError)


class UnavailableError(Exception):
    """A part that this machine cannot run; the message says why. It is not recorded as done."""


def write_json(path: Path, content: Any) -> None:
    """Replaced as a whole, in a few lines only: counts by prompt make long lists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    temporary.rename(path)


def read_json(path: Path, keys: tuple[str, ...]) -> Figures:
    """A file that `write_json` wrote.

    Raises:
        UserError: it is damaged, or something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot be read: {error}", where=str(path), mend="move it away, or put a whole one back"
        ) from None
    if not isinstance(found, dict):
        found = {}
    missing = [key for key in keys if key not in found]
    missing += [key for key in ("settings", "parts", "environment") if not isinstance(found.get(key, {}), dict)]
    if missing:
        what = f"is no file of results (no {', '.join(missing)})"
        raise UserError(what, where=str(path), mend="move it away, or put the right one back")
    return found


@dataclass
class Store:
    """Runs parts once each.

    Args:
        folder: where `parts/` is.
        merged: one file with all parts; parts are restored from it.
        until_s: no part is started that would end after this moment (time.monotonic).
        environment: device, versions, commit, command; kept with each part.
        settings: of the experiment; parts measured with others are refused.
    """

    folder: Path
    merged: Path
    until_s: float
    environment: Figures
    settings: Figures
    left: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def restore(self) -> None:
        """Parts of the merged file that the folder lacks.

        Raises:
            UserError: they were measured with other settings, the file is damaged, or the folder cannot be written.
        """
        try:
            (self.folder / "parts").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot be made: {error}", where=str(self.folder), mend="name another folder") from None
        if not self.merged.is_file():
            return
        found = read_json(self.merged, ("settings", "parts"))
        if found["settings"] != self.settings:
            changed = [k for k in self.settings if found["settings"].get(k) != self.settings[k]]
            raise UserError(
                f"was measured with other settings ({', '.join(changed)})", where=str(self.merged), mend="move it away"
            )
        for name, figures in found["parts"].items():
            if not self.path(name).is_file():
                write_json(self.path(name), figures)

    def path(self, name: str) -> Path:
        """File of a part."""
        return self.folder / "parts" / f"{name}.json"

    def find(self, name: str) -> Figures | None:
        """Figures of a part that was measured, or None."""
        path = self.path(name)
        return read_json(path, ("part_s", "environment")) if path.is_file() else None

    def part(self, name: str, measure: Callable[[], Figures], *, cost_s: float, needed: bool = False) -> Figures | None:
        """The figures of a part, measured now or earlier; None if there is no time left, it cannot run here, or failed.

        Args:
            cost_s: what it takes at most, as far as known.
            needed: by all others: a mistake of the user that it meets ends the run.

        Raises:
            UserError: as `needed` says.
        """
        found = self.find(name)
        if found is not None:
            return found
        left_s = self.until_s - time.monotonic()
        if left_s < cost_s:
            self.left.append(name)
            print(f"{name}: left for another call ({left_s:.0f} s left, it takes about {cost_s:.0f})", flush=True)
            return None
        begin = time.monotonic()
        try:
            figures = measure()
        except UnavailableError as error:
            print(f"{name}: skipped, {error}", flush=True)
            return None
        except RunStoppedError:
            raise
        except FAILURES as error:  # the other parts are still worth their seconds; the exit code tells
            if needed and isinstance(error, UserError):
                raise
            traceback.print_exc(file=sys.stdout)
            self.failed.append(name)
            return None
        figures |= {"part_s": time.monotonic() - begin, "environment": self.environment}
        write_json(self.path(name), figures)
        self.merge()
        print(f"{name}: {figures['part_s']:.1f} s", flush=True)
        return figures

    def merge(self) -> None:
        """Writes all parts into one file."""
        paths = sorted((self.folder / "parts").glob("*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name))
        parts = {path.stem: read_json(path, ("part_s", "environment")) for path in paths}
        write_json(self.merged, {"schema_version": SCHEMA_VERSION, "settings": self.settings, "parts": parts})
