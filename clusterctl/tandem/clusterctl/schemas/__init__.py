"""Types of the documents that `-o json` prints, and their schemas."""
