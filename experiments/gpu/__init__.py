"""The first hour on a GPU: checks and measurements in one command. `python -m experiments.gpu`."""
