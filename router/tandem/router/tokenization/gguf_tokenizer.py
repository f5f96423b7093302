"""The tokenizer of a GGUF file, as the tokenizers library has it."""

from __future__ import annotations

from tokenizers import Tokenizer as HubTokenizer

from tandem.core.gguf.metadata import Metadata
from tandem.core.gguf.tokenizer_json import BESIDE, tokenizer_json
from tandem.core.gguf.tokens import TOKENS


def build_tokenizer(metadata: Metadata) -> HubTokenizer:
    """Build the tokenizer of the file. Raises ModelError for what it lacks, and for kinds that are not read."""
    text = tokenizer_json(metadata)
    try:
        return HubTokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception for what does not fit together
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise metadata.error(TOKENS, f"they make no tokenizer: {why}", BESIDE) from error
