"""The Responses API: its requests, their chats, the objects and events of answers, and the stored conversations."""
