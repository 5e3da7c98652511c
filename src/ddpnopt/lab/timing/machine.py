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

PACKAGES = (
    "pytorch_optimizer",
    "schedulefree",
    "prodigyopt",
    "singd",
    "curvlinops-for-pytorch",
    "backpack-for-pytorch",
)


def heading(threads: int = 1) -> str:
    """Machine, threads, versions and command, for the top of a table."""
    machine, versions = facts()
    return "\n".join(
        [
            f"- machine: {machine}",
            f"- torch threads: {threads} per process",
            f"- versions: {versions}",
            f"- command: `{command()}`",
        ]
    )


def command() -> str:
    """What the user has typed."""
    return shlex.join(["ddpnopt", *sys.argv[1:]])


def facts() -> tuple[str, str]:
    """The machine, and the versions of what runs on it."""
    found = [f"ddpnopt {ddpnopt.__version__}", f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"{processor()}, {os.cpu_count()} cores, {platform.system()}", ", ".join(found)


def processor() -> str:
    """The processor's name where the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
