"""Where and how numbers were measured."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import ddpnopt

PEERS = ("pytorch_optimizer", "schedulefree", "prodigyopt")


def heading(threads: int = 1) -> str:
    """Machine, threads, versions and command, for the top of a table."""
    found = [f"ddpnopt {ddpnopt.__version__}", f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    for package in PEERS:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    command = shlex.join(["ddpnopt", *sys.argv[1:]])
    return "\n".join(
        [
            f"- machine: {processor()}, {os.cpu_count()} cores, {platform.system()}",
            f"- torch threads: {threads} a process",
            f"- versions: {', '.join(found)}",
            f"- command: `{command}`",
        ]
    )


def processor() -> str:
    """The processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
