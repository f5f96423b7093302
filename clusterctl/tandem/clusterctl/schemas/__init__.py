"""The shapes of what `-o json` prints, and their schemas."""
