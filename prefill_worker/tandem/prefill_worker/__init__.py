"""The prefill role: order the queue, compute prompts, push KV, hand over the first token."""
