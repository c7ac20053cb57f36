"""The verbs that need more than a call of their SQL function. Each module has the name of its noun."""
