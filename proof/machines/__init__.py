"""State machines of the hand-over run for long: workers, router and wires in every order that a seed draws."""
