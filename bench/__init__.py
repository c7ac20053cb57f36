"""Figures of Custody as ratios within one run: beside bare PostgreSQL, beside itself, beside its peers."""
