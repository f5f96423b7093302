"""Anthropic's Messages API: its requests become chats, answers of chats become its messages and events."""
