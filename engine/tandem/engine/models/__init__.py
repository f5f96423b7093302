"""Forward graphs. One file a graph, not one a model family."""
