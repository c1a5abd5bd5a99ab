"""Adapter: single keys from a terminal, without waiting for Enter, and signals while one waits for them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType
from typing import Any

END_KEYS = b"qQ\x03\x04"


class Pressed(Enum):
    NOTHING = "nothing"
    END = "end"  # q, Ctrl-C, Ctrl-D, SIGTERM, SIGHUP
    RESIZED = "resized"


@dataclass(eq=False, slots=True)
class Keyboard:
    """As a context it owns the terminal's input mode and the signals, and restores both. Main thread only. Without a
    terminal there are signals alone.

    The next `wait` returns a signal; the code in between is not interrupted, except by Ctrl-C, which raises.
    """

    terminal: int | None = None
    wakes: int = -1  # readable after a signal
    ended: bool = False
    resized: bool = False
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Keyboard:
        self.wakes, wake = os.pipe()
        for number in (self.wakes, wake):
            os.set_blocking(number, False)
            self.undo.callback(os.close, number)
        self.undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(wake, warn_on_full_buffer=False))
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH):
            self.undo.callback(signal.signal, number, signal.signal(number, self._on_signal))
        if sys.stdin.isatty():
            self.terminal = sys.stdin.fileno()
            self.undo.callback(self._restore, self.terminal, termios.tcgetattr(self.terminal))
            tty.setcbreak(self.terminal)
        return self

    def __exit__(self, *_: object) -> None:
        self.undo.close()

    def _restore(self, terminal: int, mode: list[Any]) -> None:
        with contextlib.suppress(termios.error):  # it was closed
            termios.tcsetattr(terminal, termios.TCSADRAIN, mode)

    def wait(self, seconds: float) -> Pressed:
        end = time.monotonic() + seconds
        while True:
            if self.ended:
                return Pressed.END
            if self.resized:
                self.resized = False
                return Pressed.RESIZED
            files = [self.wakes] if self.terminal is None else [self.wakes, self.terminal]
            try:
                ready, _, _ = select.select(files, [], [], max(end - time.monotonic(), 0.0))
            except KeyboardInterrupt:
                return Pressed.END
            if not ready:
                return Pressed.NOTHING
            if self.wakes in ready:
                os.read(self.wakes, 4096)
            if self.terminal in ready:
                self._read()

    def _read(self) -> None:
        assert self.terminal is not None
        try:
            keys = os.read(self.terminal, 1024)
        except OSError:
            keys = b""
        if not keys or any(key in END_KEYS for key in keys):  # no keys: the terminal is gone
            self.ended = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGWINCH:
            self.resized = True
        else:
            self.ended = True
