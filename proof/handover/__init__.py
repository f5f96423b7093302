"""Random trouble between two ranks: every answer that ends is the undisturbed one, and nothing is held after."""
