"""Plot: draw a schedule's memory and timeline as .png or .svg; `text` draws them, and layouts, as text.

Pictures need matplotlib, the extra `plot`, which is imported when one is drawn; no display is needed.
"""

from fnshard.plot import text
from fnshard.plot.pictures import memory, stages, timeline

__all__ = ["memory", "stages", "text", "timeline"]
