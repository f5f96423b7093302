"""Parts of ``tools/train_tiny.py``: the corpus, tokenizer, graph, optimiser and export of the bundled model."""
