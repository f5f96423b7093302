"""Commands about SLO classes, API keys, and how requests are routed."""
