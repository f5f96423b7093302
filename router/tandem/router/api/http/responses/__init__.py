"""The Responses API: what clients send, how it becomes a chat, the objects and events that go back, what is kept."""
