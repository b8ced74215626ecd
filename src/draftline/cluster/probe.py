"""What a host is asked before it gets a worker: versions, and whether it sees the same files. Imports no torch."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import draftline
from draftline.errors import UserError

PACKAGES = ("torch", "transformers", "safetensors", "ray")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """One host.

    Attributes:
        host: its address.
        versions: of draftline (with a hash of its source), Python and the packages that compute.
        missing: those of the paths asked for that are not there.
    """

    host: str
    versions: dict[str, str]
    missing: tuple[str, ...]


def host_facts(host: str, paths: Sequence[str]) -> HostFacts:
    """Of the host that this runs on."""
    found = {"draftline": f"{draftline.__version__} (source {_source_hash()})", "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return HostFacts(host, found, tuple(path for path in paths if not Path(path).expanduser().exists()))


def require_alike(head: HostFacts, others: Sequence[HostFacts]) -> None:
    """All hosts run the same code on the same files.

    Raises:
        UserError: names the first host that differs, and both values.
    """
    for facts in others:
        for name, wanted in head.versions.items():
            if facts.versions.get(name) != wanted:
                raise UserError(
                    f"{name} is {facts.versions.get(name)} there and {wanted} on the head node",
                    where=f"host {facts.host}",
                    mend="install the same versions on all hosts",
                )
        if facts.missing:
            raise UserError(
                f"{facts.missing[0]} is there on the head node, but not on this host",
                where=f"host {facts.host}",
                mend="put it on a disk that all hosts see, or under the same path on each of them",
            )


def _source_hash() -> str:
    """Of all Python files of the package: two working trees of one version are told apart."""
    root = Path(draftline.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
