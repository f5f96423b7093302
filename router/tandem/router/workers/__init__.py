"""The workers as this router knows them: a stream to each, what they report, what they hold of a prompt."""
