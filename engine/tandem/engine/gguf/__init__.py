"""A GGUF file as a model: its config, and its tensors under the names and in the order that the decoder has."""
