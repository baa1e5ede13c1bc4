"""Rules about numeric recipes."""
RULES = ()
LAYOUT_RULES = ()
