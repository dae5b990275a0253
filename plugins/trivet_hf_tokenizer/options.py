"""Options of ``plugins.tokenizer``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trivet_schemas.options import Options


class HFTokenizerOptions(Options):
    """Options of ``hf_tokenizer``."""

    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """Chat template: a file, the name of one of the tokenizer's templates, or the Jinja text itself.

    None takes the configuration's `chat_template`, else the tokenizer's own."""
