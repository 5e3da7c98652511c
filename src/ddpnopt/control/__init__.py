"""Optimal control by differential dynamic programming, Algorithm 1, and by Pontryagin's principle."""

from .errors import ControlError
from .pmp import costate, hamiltonian, hamiltonian_gradient
from .problem import Problem
from .solution import History, Rollout, Solution, Status
from .solver import solve

__all__ = [
    "ControlError",
    "History",
    "Problem",
    "Rollout",
    "Solution",
    "Status",
    "costate",
    "hamiltonian",
    "hamiltonian_gradient",
    "solve",
]
