"""Hosts as network namespaces: separate addresses on one bridge, a raylet in each, links that can be cut, one token.

Needs the right to make network namespaces. `possible` says whether that is so here.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

NET = "10.213.77"
RAY = Path(sys.executable).with_name("ray")
PORT = 6379


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def possible() -> bool:
    """True if this process may make hosts: namespaces, a bridge, links, and processes inside."""
    try:
        with Hosts(1) as made:
            subprocess.run(made.command(0, "true"), check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return False
    return True


class Hosts:
    """`n` hosts on one bridge; host 0 is the head. Use as a context manager."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.tag = f"dl{secrets.token_hex(3)}"  # the system takes a while to forget the names of hosts that are gone
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        lean = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0"}
        self.environment = {**os.environ, **token, **lean}

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._remove()

    def _make(self) -> None:
        ip("link", "add", self.bridge, "type", "bridge")
        ip("link", "set", self.bridge, "up")
        for number in range(self.n):
            name, outer = self.name(number), self.outer(number)
            ip("netns", "add", name)
            ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", outer, "master", self.bridge)
            ip("link", "set", outer, "up")
            for words in (["addr", "add", f"{self.address(number)}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
                ip("-n", name, *words)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "route", "add", "default", "via", f"{NET}.254")  # nobody is there; hosts have a route

    def _remove(self) -> None:
        for number in range(self.n):
            self.kill(number)
            shutil.rmtree(self.disk(number), ignore_errors=True)
            for words in (["netns", "del", self.name(number)], ["link", "del", self.outer(number)]):
                subprocess.run(["ip", *words], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True, check=False)

    @property
    def bridge(self) -> str:
        return f"{self.tag}br"

    def name(self, number: int) -> str:
        return f"{self.tag}h{number}"

    def outer(self, number: int) -> str:
        return f"{self.tag}v{number}"

    def address(self, number: int) -> str:
        return f"{NET}.{number + 1}"

    def disk(self, number: int) -> Path:
        return Path(tempfile.gettempdir(), self.name(number))

    def command(self, number: int, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name(number), *words]

    def start_ray(self, number: int, *options: str) -> None:
        where = (
            ["--head", f"--port={PORT}", "--include-dashboard=false", "--no-monitor"]
            if number == 0
            else [f"--address={self.head}"]
        )
        words = [
            "start",
            *where,
            f"--node-ip-address={self.address(number)}",
            f"--temp-dir={self.disk(number)}",  # in a common one, hosts that start at a time choose the same sockets
            "--disable-usage-stats",
            "--include-log-monitor=false",
        ]
        command = self.command(number, str(RAY), *words, *options)
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    @property
    def head(self) -> str:
        return f"{self.address(0)}:{PORT}"

    def processes(self, number: int, title: str = "") -> list[psutil.Process]:
        """Processes of a host, with a title that begins so."""
        words = ["ip", "netns", "pids", self.name(number)]
        pids = subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()
        found = []
        for pid in map(int, pids):
            try:
                process = psutil.Process(pid)
                if (process.cmdline() or [""])[0].startswith(title):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def kill(self, number: int) -> None:
        """The host is gone: every process in it, at once."""
        found = self.processes(number)
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=20)

    def cut(self, number: int, seconds: float) -> None:
        """Nothing reaches the host for a while."""
        ip("link", "set", self.outer(number), "down")
        time.sleep(seconds)
        ip("link", "set", self.outer(number), "up")
