"""Plot: pictures of layouts and of a step on paper, as .png or .svg; `text` has them for a terminal.

A mesh, a leaf on it, a whole tree's layout; memory over the schedule, its timeline, its traffic. Needs
matplotlib, the extra `plot` (`text` does not); it is imported when something is drawn, and draws without a
display.
"""

from fnshard.plot import text
from fnshard.plot.sharding import leaf, mesh
from fnshard.plot.steps import memory, timeline, traffic
from fnshard.plot.treemap import tree

__all__ = ["leaf", "memory", "mesh", "text", "timeline", "traffic", "tree"]
