"""Commands about what the API promises, to whom, and how requests are routed."""
