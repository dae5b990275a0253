"""Entry point ``acme_watermark``: makes a keyed share of the vocabulary likelier after each token.

Kirchenbauer et al., "A Watermark for Large Language Models", ICML 2023: the token before decides, with a secret key,
which tokens are green; whoever knows the key counts the green ones.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from trivet.context import Context
from trivet.hookspecs import hookimpl
from trivet.roles import Side
from trivet_schemas.options import Options

if TYPE_CHECKING:
    from trivet.roles import Sampled, SampleRows


class WatermarkOptions(Options):
    """Options of ``acme_watermark``."""

    key: int
    """The secret."""
    strength: float = Field(2.0, ge=0)
    """What is added to a green token's logit."""
    share: float = Field(0.5, gt=0, lt=1)
    """Share of green tokens."""


trivet_options = WatermarkOptions


def green_tokens(key: int, before: int, vocab_size: int, share: float) -> NDArray[np.int64]:
    """Ids of the green tokens after token ``before``."""
    rng = np.random.default_rng([key, before])
    return rng.permutation(vocab_size)[: int(vocab_size * share)]


class Watermark:
    """Wraps the sampling phase; each logits row is treated after the token that it follows, drafts included."""

    def __init__(self, options: WatermarkOptions) -> None:
        self._options = options

    @hookimpl(wrapper=True)
    def trivet_sample(self, logits: Any, rows: SampleRows) -> Generator[None, Sampled, Sampled]:
        """Raise the logits of green tokens."""
        options = self._options
        for index in range(len(rows.slots)):
            slot, first = int(rows.slots[index]), int(rows.starts[index])
            last = int(rows.tokens[slot, rows.lengths[slot] - 1])
            # A draft's row follows the draft itself, in a chain and in a tree.
            for offset, before in enumerate([last, *rows.drafts.row(index).tolist()]):
                green = green_tokens(options.key, before, logits.shape[1], options.share)
                logits[first + offset, green] += options.strength
        return (yield)


@hookimpl
def trivet_extend(context: Context) -> Sequence[object]:
    """The watermark of a worker; the engine's side has none."""
    if context.side is not Side.WORKER:
        return []
    return [Watermark(WatermarkOptions(**context.options("acme_watermark")))]
