"""Custody beside its peers, each on its own terms: the client's batch calls, pipelines and workers of each."""
