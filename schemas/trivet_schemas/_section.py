"""Base of the models that are filled from a configuration file."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

from trivet_schemas.validation import members


class Section(BaseModel):
    """A mapping of the configuration: unknown keys are refused, and it cannot change once it is made."""

    # Validators are built when they are first needed: most commands load many models and use few of them.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        # Pydantic reads true as 1, which hides `max_num_seqs: true`, the slip of a user who meant another key.
        if isinstance(value, bool) and info.field_name is not None:
            kinds = members(cls.model_fields[info.field_name].annotation)
            if bool not in kinds and Any not in kinds:
                if int in kinds:
                    raise PydanticKnownError("int_type")
                if float in kinds:
                    raise PydanticKnownError("float_type")
        return value
