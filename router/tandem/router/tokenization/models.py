"""The models that this router serves, by the names that clients use for them: one tokenizer for each revision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.core.config import ServedModel
from tandem.core.errors import InvalidRequestError, UnknownModelError
from tandem.router.error_quoting import quoted
from tandem.router.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedModel:
    """`name` is the one that its workers report; requests name one of `served_names`."""

    name: str
    served_names: tuple[str, ...]
    tokenizer: Tokenizer


class ModelRegistry:
    """At least one model; their names are distinct."""

    def __init__(self, models: Sequence[TokenizedModel]) -> None:
        self._models = tuple(models)
        self._by_name = {name: model for model in models for name in model.served_names}

    @classmethod
    def load(cls, configured: Sequence[ServedModel]) -> ModelRegistry:
        """Read the tokenizers; raises ModelError."""
        return cls([_load(model) for model in configured])

    def __iter__(self) -> Iterator[TokenizedModel]:
        return iter(self._models)

    @property
    def served_names(self) -> tuple[str, ...]:
        """All names, model by model."""
        return tuple(self._by_name)

    def find(self, name: str) -> TokenizedModel:
        """The model of that name; UnknownModelError if there is none."""
        model = self._by_name.get(name)
        if model is None:
            raise UnknownModelError(
                f"the model {quoted(name)} does not exist",
                why=f"this cluster serves {', '.join(self._by_name)}",
                param="model",
            )
        return model

    def only(self) -> TokenizedModel:
        """The one model, for requests that need not name it; InvalidRequestError if there are several."""
        if len(self._models) > 1:
            why, todo = "this cluster serves several", f"name one of {', '.join(self._by_name)}"
            raise InvalidRequestError("the model is missing", why=why, todo=todo, param="model")
        return self._models[0]


def _load(model: ServedModel) -> TokenizedModel:
    template = Path(model.chat_template) if model.chat_template else None
    tokenizer = Tokenizer.load(Path(model.model_dir), template)
    return TokenizedModel(name=model.name, served_names=model.served_names or (model.name,), tokenizer=tokenizer)
