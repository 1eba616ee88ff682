"""Launcher: ranks of one machine: started, watched, ended, and why they died."""
