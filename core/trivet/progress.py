"""The progress bar of offline calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from trivet.output.stage import Output
from trivet_schemas.outputs import RequestOutput

UseTqdm = bool | Callable[..., Any]


class Progress:
    """A progress bar over requests, or nothing."""

    def __init__(self, total: int, use_tqdm: UseTqdm) -> None:
        """Show a bar of ``total`` requests, made by ``use_tqdm`` if that is a function."""
        self._bar: Any = None
        self._tokens = 0
        if use_tqdm:
            if callable(use_tqdm):
                make = use_tqdm
            else:
                from tqdm.auto import tqdm as make
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True)

    def report(self, output: Output) -> None:
        """A request has ended with ``output``."""
        if self._bar is None:
            return
        if isinstance(output, RequestOutput):
            self._tokens += sum(len(o.token_ids) for o in output.outputs)
            elapsed = self._bar.format_dict["elapsed"] if hasattr(self._bar, "format_dict") else 0
            if elapsed:
                self._bar.set_postfix_str(f"{self._tokens / elapsed:.1f} output tokens/s", refresh=False)
        self.advance()

    def advance(self) -> None:
        """One more is done."""
        if self._bar is not None:
            self._bar.update(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()
