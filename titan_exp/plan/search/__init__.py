"""Layout search: enumeration, estimates from the nearest traces, best-first extrapolation."""
