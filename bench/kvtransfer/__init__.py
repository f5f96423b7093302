"""KV transfer against what the machine can do: every transport, checksums, codecs, overlap with compute, slow links."""
