"""Reading GGUF files, versions 2 and 3: metadata and the directory of tensors. Standard library alone.

It must not know what metadata means to a model, and makes no numbers of tensors: engine and router do.
"""
