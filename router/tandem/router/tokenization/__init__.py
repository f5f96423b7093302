"""Between text and tokens: tokenizers, chat templates, detokenizing, by model."""
