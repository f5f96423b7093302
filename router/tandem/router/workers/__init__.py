"""The workers as this router knows them: a stream to each, their reports, the blocks of a prompt that they hold."""
