"""SLO classes as the admin port offers them: which there are, and another promise while requests run."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from tandem.core.config import SLO_NAME, SloSection
from tandem.router.admission.slo_classes import SloClasses


class NewSlo(BaseModel):
    """A class, new or known, and all that it promises from now on; 0 = nothing. Seconds."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    slo: str = Field(pattern=f"^{SLO_NAME}$")
    ttft_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    itl_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class SloHandlers:
    """Requests that have arrived keep their promises."""

    def __init__(self, classes: SloClasses) -> None:
        self._classes = classes

    def list(self) -> dict[str, Any]:
        """Every class with its promises, and the one of requests that name none ("" = none)."""
        rows = [
            {"slo": name, "ttft_s": section.ttft_s, "itl_s": section.itl_s}
            for name, section in sorted(self._classes.sections.items())
        ]
        return {"classes": rows, "default_slo": self._classes.default}

    def set(self, new: NewSlo) -> dict[str, Any]:
        """Promise this from now on, until the router starts again; returns the new `list`."""
        self._classes.set(new.slo, SloSection(ttft_s=new.ttft_s, itl_s=new.itl_s))
        return self.list()
