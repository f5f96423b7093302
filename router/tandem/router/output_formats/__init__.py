"""Formats in which model families write reasoning and tool calls: how to find them, their parsers, their grammars."""
