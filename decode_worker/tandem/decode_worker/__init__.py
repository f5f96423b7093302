"""The decode role: reserve blocks, admit received KV, generate, stream."""
