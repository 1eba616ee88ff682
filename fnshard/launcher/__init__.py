"""Launcher: ranks and nodes: started, watched, ended, and why they died."""
