"""Runs side by side: groups, statistics, answers, tables."""
