"""Layout search: enumeration, lower bounds, branch and bound."""
