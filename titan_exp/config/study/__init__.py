"""Study files: axes, points, baseline."""
