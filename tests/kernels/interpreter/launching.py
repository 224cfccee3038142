"""Launching a kernel in a test, in one line."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from kernels.interpreter import KernelError, Report, interpret

SCHEDULES = ("in_order", "reverse", "random")
Error = TypeVar("Error", bound=KernelError)


def launch(kernel: Any, configuration: tuple[Any, ...], *arguments: Any, **options: Any) -> Report:
    """`kernel[configuration](*arguments)` inside `interpret(**options)`."""
    with interpret(**options) as report:
        kernel[configuration](*arguments)
    return report


def failure(
    kind: type[Error], kernel: Any, configuration: tuple[Any, ...], *arguments: Any, **options: Any
) -> Error:
    """The error that the launch must end with; exactly of this kind, since all kinds derive from KernelError."""
    with pytest.raises(kind) as caught:
        launch(kernel, configuration, *arguments, **options)
    assert type(caught.value) is kind
    return caught.value


def source_lines(kernel: Any, text: str) -> list[int]:
    """Numbers of the lines of a kernel that contain a text."""
    code = kernel.py_func.__code__
    with open(code.co_filename, encoding="utf-8") as file:
        lines = file.read().splitlines()
    last = max(line for _, _, line in code.co_lines() if line)
    return [n for n in range(code.co_firstlineno, last + 1) if text in lines[n - 1]]
