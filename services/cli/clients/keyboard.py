"""Adapter: single keys from a terminal, without waiting for Enter; and what a signal does to who waits for them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from enum import Enum
from types import FrameType
from typing import Any

END_KEYS = b"qQ\x03\x04"


class Pressed(Enum):
    NOTHING = "nothing"
    END = "end"  # q, Ctrl-C, Ctrl-D, SIGTERM, SIGHUP
    RESIZED = "resized"


class Keyboard:
    """As a context it owns the terminal's input mode and the signals, and gives both back as they were. Main thread
    only. Where the input is no terminal there are signals alone.

    A signal is heard by the next `wait`: what runs in between is not broken off, but Ctrl-C, which raises.
    """

    def __init__(self) -> None:
        self._terminal: int | None = None
        self._mode: list[Any] = []
        self._handlers: dict[int, Any] = {}
        self._wakes, self._wake = -1, -1
        self._old_wake = -1
        self._ended = False
        self._resized = False

    def __enter__(self) -> Keyboard:
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wakes, False)
        os.set_blocking(self._wake, False)
        self._old_wake = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for number, heard in (
            (signal.SIGTERM, self._on_end),
            (signal.SIGHUP, self._on_end),
            (signal.SIGWINCH, self._on_resize),
        ):
            self._handlers[number] = signal.signal(number, heard)
        if sys.stdin.isatty():
            self._terminal = sys.stdin.fileno()
            self._mode = termios.tcgetattr(self._terminal)
            tty.setcbreak(self._terminal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal is not None:
            with contextlib.suppress(termios.error):  # it was closed
                termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._mode)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wake)
        os.close(self._wakes)
        os.close(self._wake)

    def wait(self, seconds: float) -> Pressed:
        end = time.monotonic() + seconds
        while True:
            if self._ended:
                return Pressed.END
            if self._resized:
                self._resized = False
                return Pressed.RESIZED
            files = [self._wakes] if self._terminal is None else [self._wakes, self._terminal]
            try:
                ready, _, _ = select.select(files, [], [], max(end - time.monotonic(), 0.0))
            except KeyboardInterrupt:
                return Pressed.END
            if not ready:
                return Pressed.NOTHING
            if self._wakes in ready:
                os.read(self._wakes, 4096)
            if self._terminal in ready:
                self._read()

    def _read(self) -> None:
        assert self._terminal is not None
        try:
            keys = os.read(self._terminal, 1024)
        except OSError:
            keys = b""
        if not keys or any(key in END_KEYS for key in keys):  # nothing: nobody is there any more
            self._ended = True

    def _on_end(self, number: int, frame: FrameType | None) -> None:
        self._ended = True

    def _on_resize(self, number: int, frame: FrameType | None) -> None:
        self._resized = True
