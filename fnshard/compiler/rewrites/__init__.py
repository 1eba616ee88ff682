"""Rewrites: functions that change or check the graph of a Program."""
