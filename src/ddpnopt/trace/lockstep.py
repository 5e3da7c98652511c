"""Several calls that take turns, each in a thread of its own, of which only one runs at a time.

A forward pass cannot be suspended in the middle, but a thread can. Nothing here runs concurrently.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Gate = TypeVar("Gate")  # what a run shows where it pauses
Result = TypeVar("Result")


class _Closed(BaseException):
    """Unwinds a run that is not to continue."""


class Turn(Generic[Gate, Result]):
    """A call that can pause itself: `resume` runs it to its next `pause`, or to its end."""

    def __init__(self, call: Callable[[Turn[Gate, Result]], Result]) -> None:
        self._call = call
        self._wake, self._sleep = threading.Semaphore(0), threading.Semaphore(0)
        self._gate: Gate | None = None
        self._error: BaseException | None = None
        self._closed = False
        self.result: Result | None = None
        self.done = False
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), daemon=True)

    def _run(self) -> None:
        self._wake.acquire()
        try:
            if not self._closed:
                self.result = self._call(self)
        except _Closed:
            pass
        except BaseException as error:  # raised again in resume()
            self._error = error
        self.done = True
        self._sleep.release()

    def pause(self, gate: Gate) -> None:
        """Called inside the run: wait at this gate until the next `resume`."""
        self._gate = gate
        self._sleep.release()
        self._wake.acquire()
        if self._closed:
            raise _Closed

    def resume(self) -> Gate | None:
        """Called outside: the gate that the run has reached, None at its end; its errors are raised here."""
        if self._thread.ident is None:
            self._thread.start()
        self._gate = None
        self._wake.release()
        self._sleep.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._gate

    def close(self) -> None:
        """End the run where it is."""
        if self.done or self._thread.ident is None:
            return
        self._closed = True
        self.resume()
        self._thread.join()
