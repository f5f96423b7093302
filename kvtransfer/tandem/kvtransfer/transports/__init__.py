"""Ways to carry frames between two ranks. Each has a listener at the receiver and a link at the sender (`base`)."""
