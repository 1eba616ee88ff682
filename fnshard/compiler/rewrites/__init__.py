"""Rewrites: functions Program -> Program."""
