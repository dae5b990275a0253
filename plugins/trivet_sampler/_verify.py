"""Verification of drafts: which of them are the very tokens that would have been drawn without them."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.plan import Int32


def follow(drawn: Sequence[int], drafts: Int32, parents: Int32 | None) -> list[int]:
    """The accepted path through a row's drafts.

    Every logits row has had a token drawn from it with the noise of its own position, so the path of drafts that
    equal what was drawn before them is what an unspeculated run would give.

    Args:
        drawn: ``[1 + d]`` tokens: the one after the known tokens, then the one after each draft.
        drafts: ``[d]`` ids.
        parents: ``[d]`` index of the draft that each follows, -1 for the known tokens; None: a chain.

    Returns:
        Indices of the accepted drafts, in order. The row's own token is ``drawn[1 + path[-1]]`` (``drawn[0]`` if none
        is accepted).
    """
    path: list[int] = []
    node = -1
    for index, token in enumerate(drafts.tolist()):
        parent = index - 1 if parents is None else int(parents[index])
        if parent == node and token == drawn[1 + node]:
            path.append(index)
            node = index
    return path
